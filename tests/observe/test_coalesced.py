"""Calls that torch holds back are under way until it has made them; who stays away from them is found."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.observe.traced import begins, environment, record, results, torchrun, workbench_trace
from workbench.trace import pair_calls


def test_coalesced_calls_end_with_the_work_that_stands_for_all_of_them(tmp_path: Path) -> None:
    trace, told = record(tmp_path, torchrun("coalesced.py", "all"))
    plain = subprocess.run(
        torchrun("coalesced.py", "all"), env=environment(), capture_output=True, text=True, timeout=100, check=True
    )
    assert results(told) == results(plain.stdout)
    mine = [e for e in trace.events if e.world_rank == 0 and e.op in ("all_reduce", "wait")]
    assert [(e.phase.value, e.op, e.sequence, e.note) for e in mine[2:12]] == [
        *(("B", "all_reduce", n, "default group") for n in (3, 4)),
        *(("E", "all_reduce", n, "default group") for n in (3, 4)),
        *(("B", "all_reduce", n, "default group; async") for n in (5, 6)),
        ("B", "wait", 1, "for all_reduce #5 on world[0,1] and 1 more"),
        ("E", "wait", 1, ""),
        *(("E", "all_reduce", n, "default group; async") for n in (5, 6)),
    ]
    assert [str(c.event) for c in pair_calls(trace.events) if c.end is None] == []
    assert not [e for e in begins(trace, 0) if "below Python" in e.note], "no call is recorded twice"


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("late", "waits_in"), [("sums", "all_reduce"), ("async", "all_reduce"), ("send", "recv")])
def test_who_stays_away_from_coalesced_calls_is_found(tmp_path: Path, late: str, waits_in: str) -> None:
    traced = workbench_trace(tmp_path, torchrun("coalesced.py", late), deadline_s=4)
    first = traced.document["findings"][0]
    assert (first["kind"], first["ranks"]) == ("missing-call", [1]), traced.stderr
    assert f"{waits_in} in main (" in first["message"]
