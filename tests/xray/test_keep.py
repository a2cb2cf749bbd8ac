"""`workbench trace --keep`: a job in which a rank is slow is told of at its deadline, and goes on to its own end.

Exact: exit status, verdict, how often it is told. Real processes; the slow rank computes for longer than the deadline.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.observe.traced import results, torchrun, workbench_trace

TOLD = "verdict: suspected defect after 2 s without an event; the job goes on (--keep)"


@pytest.mark.timeout(200)
def test_a_slow_rank_is_told_of_once_and_the_job_ends_well(tmp_path: Path) -> None:
    traced = workbench_trace(tmp_path, torchrun("slow_rank.py", ranks=3), deadline_s=2, keep=True)
    assert (traced.status, traced.document["verdict"], traced.document["command_status"]) == (0, "ok", 0), traced.stderr
    assert TOLD in traced.stderr
    assert traced.stderr.count("first cause: missing-call on world[0,1,2] by world rank 0 (likely)") == 1
    assert "it may only be slow" in traced.stderr
    assert set(results(traced.stdout)) == {"0", "1", "2"}


@pytest.mark.timeout(200)
def test_what_is_true_at_the_end_of_a_kept_job_is_its_verdict(tmp_path: Path) -> None:
    traced = workbench_trace(tmp_path, torchrun("slow_rank.py", "fails"), deadline_s=2, keep=True)
    assert (traced.status, traced.document["command_status"]) == (3, 1), traced.stderr
    first = traced.document["findings"][0]
    assert (first["kind"], first["ranks"], first["certainty"]) == ("peer-exception", [0], "is")
    assert traced.document["ended_at_deadline_s"] is None
    assert TOLD in traced.stderr


@pytest.mark.timeout(200)
def test_without_keep_the_same_job_is_ended_on_suspicion(tmp_path: Path) -> None:
    traced = workbench_trace(tmp_path, torchrun("slow_rank.py"), deadline_s=2)
    assert (traced.status, traced.document["verdict"]) == (3, "defect"), traced.stderr
    assert traced.stderr.splitlines()[-1].startswith("verdict: suspected defect; report: ")
    assert "if it is only slow, use a larger --deadline, or --keep" in traced.stderr
