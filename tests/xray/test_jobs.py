"""`workbench trace` on a command that starts two jobs of mp.spawn: each is whole, and each is judged by itself.

Exact: the verdict and the world size of each job, kind, ranks and job of the findings. The jobs are real processes.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.observe.traced import PROGRAMS, Traced, workbench_diagnose, workbench_trace
from tests.ports import free_port

FINE, FAULTY = {"verdict": "ok", "world_size": 2}, {"verdict": "defect", "world_size": 2}


def _traced(directory: Path, way: str, first: str, second: str) -> Traced:
    port = free_port()
    ports = [port, port if way == "turn" else free_port()]
    command = [sys.executable, str(PROGRAMS / "spawns_jobs.py"), way, *ports, first, second]
    return workbench_trace(directory, command, deadline_s=6)


def _jobs_told(traced: Traced) -> list[tuple[int, str, list[int]]]:
    """Of each job its first finding: number, kind, ranks."""
    first = {f["job"]: f for f in reversed(traced.document["findings"])}
    return [(job, f["kind"], f["ranks"]) for job, f in sorted(first.items())]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("way", ["turn", "once"])
def test_two_jobs_that_go_well_are_two_jobs_without_a_finding(tmp_path: Path, way: str) -> None:
    traced = _traced(tmp_path, way, "fine", "fine")
    assert traced.status == 0, traced.stderr
    assert traced.document["jobs"] == [FINE, FINE]
    assert traced.document["findings"] == []
    for directory in (traced.directory / "trace", traced.directory / "trace" / "job-2"):
        assert sorted(p.name for p in directory.glob("*.wbtrace")) == ["rank-00000.wbtrace", "rank-00001.wbtrace"]


@pytest.mark.timeout(200)
def test_a_job_that_failed_is_told_though_the_next_at_the_same_port_went_well(tmp_path: Path) -> None:
    traced = _traced(tmp_path, "turn", "raise", "fine")
    assert (traced.status, traced.document["command_status"]) == (3, 0), traced.stderr
    assert traced.document["jobs"] == [FAULTY, FINE]
    assert _jobs_told(traced) == [(1, "peer-exception", [1])]
    assert re.search(r"job 1 of 2 that the command started:\nfirst cause: peer-exception", traced.stderr)
    assert re.search(r"job 2 of 2 that the command started:\nno defect found in \d+ events of 2 ranks", traced.stderr)
    assert "First cause: peer-exception, in job 1" in (traced.directory / "report.html").read_text()
    again = workbench_diagnose(traced.directory)
    assert again.returncode == 3
    assert "job 2 of 2 that the command started:\nno defect found" in again.stdout


@pytest.mark.timeout(200)
def test_of_two_jobs_at_once_the_one_that_hangs_is_judged_beside_the_one_that_failed(tmp_path: Path) -> None:
    traced = _traced(tmp_path, "once", "raise", "skip")
    assert traced.status == 3, traced.stderr
    assert traced.document["jobs"] == [FAULTY, FAULTY]
    told = {kind: ranks for _, kind, ranks in _jobs_told(traced)}
    assert told == {"peer-exception": [1], "missing-call": [1]}
    assert "world rank 0: waiting, inside all_reduce" in traced.stderr
    assert traced.document["ended_at_deadline_s"] == 6.0
