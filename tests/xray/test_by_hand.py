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
    assert traced.stdout.count("gone") == 2, "the recording keeps no group that the program has ended"
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
    assert groups == [(r, kind, 0) for r in (0, 1) for kind in ("by-hand", "by-hand", "world")]


ENGINES = f"""
import gc, multiprocessing, sys, time
import torch
sys.path.insert(0, {str(PROGRAM.parent)!r})
from by_hand import connect, make_group

def leave_together(store, num):  # who holds the store stays until all are done
    store.add("done", 1)
    while store.add("done", 0) < num:
        time.sleep(0.05)
    time.sleep(0.2)

def run(serve, num):
    engines = [multiprocessing.get_context("spawn").Process(target=serve, args=(e,)) for e in range(num)]
    [e.start() for e in engines]
    [e.join() for e in engines]
    sys.exit(max(abs(e.exitcode) for e in engines))
"""
PAIRS_AND_LEADERS = """
def serve(engine):
    store = connect(int(sys.argv[1]), engine)
    pair = make_group(store, f"pair{engine // 2}", engine % 2, 2)
    pair.allreduce([torch.ones(2)]).wait()
    if engine % 2:
        leaders = make_group(store, "leaders", engine // 2, 2)
        time.sleep(1000 * (LATE and engine == 3))
        for _ in range(3):
            leaders.allreduce([torch.ones(2)]).wait()
    pair.allreduce([torch.ones(2)]).wait()
    leave_together(store, 4)
"""
ANOTHER_ORDER = """
def serve(engine):
    store = connect(int(sys.argv[1]), engine)
    groups = [make_group(store, f"group{n}", engine, 2) for n in range(3)]
    works = [groups[n].allreduce([torch.ones(2 + n)]) for n in ((0, 1, 2) if engine == 0 else (2, 1, 0))]
    [work.wait() for work in works]
    leave_together(store, 2)
"""
DROPPED = """
def serve(engine):
    store = connect(int(sys.argv[1]), engine)
    group = make_group(store, "group", engine, 2)
    group.barrier().wait()
    if engine == 0:
        try:
            group.recv([torch.ones(2)], 1, 0).wait()
        except RuntimeError as e:
            print("closed" if "losed" in str(e) or "reset" in str(e) else e, flush=True)
    else:
        del group
        gc.collect()
    leave_together(store, 2)
"""


def _run(directory: Path, serve: str, num: int) -> Traced:
    program = directory / "engines.py"
    program.write_text(f"{ENGINES}{serve}\nif __name__ == '__main__':\n    run(serve, {num})\n")
    return workbench_trace(directory, [sys.executable, str(program), free_port()], deadline_s=6)


@pytest.mark.parametrize(("serve", "num"), [(PAIRS_AND_LEADERS.replace("LATE", "False"), 4), (ANOTHER_ORDER, 2)])
def test_engines_in_several_groups_are_told_apart_by_where_each_group_meets(
    tmp_path: Path, serve: str, num: int
) -> None:
    traced = _run(tmp_path, serve, num)
    assert (traced.status, traced.document["verdict"]) == (0, "ok"), traced.stderr


def test_who_waits_among_members_of_another_job_is_told_without_a_guess_who_is_late(tmp_path: Path) -> None:
    traced = _run(tmp_path, PAIRS_AND_LEADERS.replace("LATE", "True"), 4)
    assert traced.status == 3, traced.stderr
    assert all("leaders" not in f["message"] and "by-hand[" not in f["message"] for f in traced.document["findings"])
    assert traced.document["ended_at_deadline_s"] == 6


def test_a_group_that_the_program_lets_go_of_ends_as_it_does_without_the_recording(tmp_path: Path) -> None:
    traced = _run(tmp_path, DROPPED, 2)
    assert (traced.status, traced.document["verdict"]) == (0, "ok"), traced.stderr
    assert traced.stdout.split() == ["closed"]
