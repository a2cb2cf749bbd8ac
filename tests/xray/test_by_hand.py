"""Pins that processes without a rank are seen once they make a group by hand: real engines under `workbench trace`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.observe.traced import PROGRAMS, Traced, workbench_trace
from tests.ports import free_port
from workbench.observe import read_observed
from workbench.trace import Event, Phase

PROGRAM = PROGRAMS / "by_hand.py"
AGREE = next(n for n, text in enumerate(PROGRAM.read_text().splitlines(), start=1) if text.endswith("# agree"))


def _traced(directory: Path, way: str) -> Traced:
    return workbench_trace(directory, [sys.executable, str(PROGRAM), free_port(), way], deadline_s=6)


def _begins(traced: Traced, op: str, job: str = "") -> list[Event]:
    events = read_observed(traced.directory / "trace" / job).events
    return [e for e in events if e.op == op and e.phase is Phase.BEGIN]


def test_engines_that_agree_are_ranks_of_their_own_group_and_no_defect(tmp_path: Path) -> None:
    traced = _traced(tmp_path, "fine")
    assert (traced.status, traced.document["verdict"], traced.document["world_size"]) == (0, "ok", 2), traced.stderr
    assert traced.stdout.split() == ["gone", "gone"], "the recording keeps no group that the program has ended"
    begun = _begins(traced, "init_process_group")
    assert [e.world_rank for e in sorted(begun, key=lambda e: e.world_rank)] == [0, 1]
    assert all("by hand; meets at engines on " in e.note and "under engines" in e.note for e in begun)
    sums = _begins(traced, "all_reduce")
    assert sorted((e.world_rank, e.sequence) for e in sums) == [(r, n) for r in (0, 1) for n in range(2, 7)]
    assert {str(e.group) for e in sums} == {"world[0,1]"}
    assert {e.site.line for e in sums if e.site} == {AGREE}
    assert not any(e.site.callers for e in sums if e.site), "what starts a process is not a caller of its calls"


@pytest.mark.parametrize(("way", "kind"), [("leaves", "missing-call"), ("late", "rendezvous-partial")])
def test_an_engine_that_others_wait_for_is_named(tmp_path: Path, way: str, kind: str) -> None:
    traced = _traced(tmp_path, way)
    first = traced.document["findings"][0]
    assert (traced.status, first["kind"], first["ranks"]) == (3, kind, [1]), traced.stderr
    if way == "leaves":
        assert "all_reduce in serve (" in first["message"]
        assert f"by_hand.py:{AGREE}), call #5 of world[0,1]: world rank 0 came and still waits" in first["message"]


def test_an_engine_that_raised_is_the_first_cause(tmp_path: Path) -> None:
    traced = _traced(tmp_path, "raises")
    first = traced.document["findings"][0]
    assert (traced.status, first["kind"], first["ranks"]) == (3, "peer-exception", [1]), traced.stderr
    assert "MemoryError: no room for this request" in first["message"]


def test_an_engine_that_becomes_a_rank_of_another_world_goes_on_there(tmp_path: Path) -> None:
    traced = _traced(tmp_path, "workers")
    assert (traced.status, traced.document["verdict"]) == (0, "ok"), traced.stderr
    assert [job["world_size"] for job in traced.document["jobs"]] == [2, 2]
    assert len(_begins(traced, "all_reduce")) == 10
    later = _begins(traced, "all_reduce", "job-2")
    groups = sorted((e.world_rank, e.group.key.kind, e.group.generation) for e in later if e.group)
    assert groups == [(r, kind, 0) for r in (0, 1) for kind in ("unregistered", "unregistered", "world")]
