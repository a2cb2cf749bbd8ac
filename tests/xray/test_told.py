"""What `workbench trace` says at its end: that it ended the job, Ctrl-C, and that there was nothing to judge.

Exact: exit status, the fields of the document, whose fault it is, and the sentences.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.observe.traced import environment, torchrun, workbench_trace
from workbench.trace import TraceError
from workbench.xray import judge


@pytest.mark.timeout(200)
def test_a_job_ended_at_the_deadline_says_so_where_the_late_rank_is_and_the_cause_last(tmp_path: Path) -> None:
    traced = workbench_trace(tmp_path, torchrun("hangs.py", ranks=2), deadline_s=3)
    assert (traced.document["ended_at_deadline_s"], traced.document["interrupted"]) == (3.0, False)
    assert traced.document["findings"][0]["certainty"] == "likely"
    *_, ending, cause, late, last = traced.stderr.splitlines()
    assert ending.startswith("no rank made an event for 3 s while some waited, so the job was ended then")
    assert cause.startswith("first cause: missing-call on world[0,1] by world rank 1 (likely)")
    assert late == "world rank 1 is at hangs.py:16; if it is only slow, use a larger --deadline, or --keep"
    assert last.startswith("verdict: suspected defect; report: ")
    report = (traced.directory / "report.html").read_text()
    assert "No rank made an event for 3 s while some waited, so the job was ended then." in report
    assert "world rank 1 is at hangs.py:16; if it is only slow, use a larger --deadline, or --keep" in report
    assert judge(traced.directory / "trace").ended_at_deadline_s == 3.0


@pytest.mark.timeout(200)
def test_the_ranks_behind_a_circle_are_told_as_its_victims(tmp_path: Path) -> None:
    traced = workbench_trace(tmp_path, torchrun("pipeline_circle.py", ranks=4), deadline_s=4)
    first, *others = traced.document["findings"]
    assert (first["kind"], first["ranks"], first["certainty"]) == ("order-swap", [0, 1], "is"), traced.stderr
    assert [2] in [f["ranks"] for f in others]
    assert all(f["consequence"] and f["certainty"] == "likely" for f in others)
    assert "by world rank 2 (follows from the above): " in traced.stderr
    report = (traced.directory / "report.html").read_text()
    assert "Follows from the above. World ranks it concerns: 2." in report
    assert "World ranks at fault: 2." not in report


@pytest.mark.timeout(200)
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_on_a_job_that_hangs_tells_where_its_ranks_stood(tmp_path: Path, times: int) -> None:
    command = [sys.executable, "-m", "workbench", "trace", "--out", "out", "--json", "verdict.json", "--"]
    with (tmp_path / "stderr").open("w") as stderr:
        job = subprocess.Popen(
            [*command, *torchrun("hangs.py", ranks=2)], cwd=tmp_path, env=environment(), stderr=stderr
        )
    try:
        _until_it_hangs(tmp_path / "out" / "trace")
        job.send_signal(signal.SIGINT)
        if times == 2:
            _until_told(tmp_path / "stderr", "a second Ctrl-C")
            job.send_signal(signal.SIGINT)
        job.wait(90)
    finally:
        job.terminate()
        job.wait(60)
    told = (tmp_path / "stderr").read_text()
    document: dict[str, Any] = json.loads((tmp_path / "verdict.json").read_text())
    assert job.returncode == 130, told
    assert "verdict: ok" not in told
    assert "world rank 0: waiting, inside all_reduce" in told
    assert "interrupted; a second Ctrl-C ends the job at once\n" in told
    assert told.splitlines()[-1].startswith("interrupted; verdict: suspected defect; report: ")
    assert (document["interrupted"], document["ended_at_deadline_s"]) == (True, None)
    first = document["findings"][0]
    assert (first["kind"], first["ranks"], first["certainty"]) == ("missing-call", [1], "likely")
    again = judge(tmp_path / "out" / "trace")
    assert (again.interrupted, [f.ranks for f in again.findings]) == (True, [(1,)])


@pytest.mark.parametrize("code", ["raise SystemExit(1)", "import torch.distributed; raise SystemExit(1)"])
def test_without_torch_distributed_there_is_no_verdict_in_words(tmp_path: Path, code: str) -> None:
    traced = workbench_trace(tmp_path, [sys.executable, "-c", code])
    assert (traced.status, traced.document["verdict"]) == (1, "unknown")
    assert "nothing recorded: no process used torch.distributed" in traced.stderr
    assert "the command's exit status is 1; report: " in traced.stderr
    assert "verdict: ok" not in traced.stderr


def _until_told(file: Path, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in file.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _until_it_hangs(directory: Path) -> None:
    """Until a rank has waited for longer than the second after which it counts as waiting."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        try:
            if directory.is_dir() and judge(directory, deadline_s=1.5, running=True).findings:
                return
        except TraceError:
            pass
        time.sleep(0.2)
    raise AssertionError("the job did not hang in time")
