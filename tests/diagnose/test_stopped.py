"""A process that is stopped holds the others up; a call that a GPU is to do is waited for though its wait returned."""

from __future__ import annotations

import pytest

from tests.diagnose.made import Made, group
from workbench.diagnose import Certainty, Kind, diagnose

WORLD = group("world", 0, 1, 2)


@pytest.mark.parametrize("came", [True, False])
def test_a_stopped_rank_is_at_fault_whether_it_came_or_not(came: bool) -> None:
    made = Made(3)
    for rank in range(3):
        made.call(rank, "barrier", WORLD)
    for rank in range(3 if came else 2):
        made.begin(rank, "all_reduce", WORLD)
    made.pause(10)
    first, *others = diagnose(made.trace(), deadline_s=5.0, now_ns=made.now_ns, stopped={2})
    assert (first.kind, first.ranks, first.certainty) == (Kind.STALLED, (2,), Certainty.IS)
    assert (
        f"world rank 2 (pid 102) is stopped {'inside all_reduce' if came else 'after barrier'} in main (train.py:41)"
        in first.message
    )
    assert first.message.endswith("and world ranks 0,1 wait.")
    assert first.fix.endswith("while the process is there, SIGCONT lets it go on")
    assert "102" not in first.fix, "a job that was ended has no such process any more"
    assert [(f.kind, f.ranks, f.consequence) for f in others] == ([] if came else [(Kind.MISSING_CALL, (2,), True)])


def test_a_stopped_rank_for_which_nobody_waits_is_no_finding() -> None:
    made = Made(3)
    for rank in range(3):
        made.call(rank, "barrier", WORLD)
    made.pause(10)
    assert diagnose(made.trace(), deadline_s=5.0, now_ns=made.now_ns, stopped={2}) == ()


@pytest.mark.parametrize(("note", "found"), [("async; on the GPU", True), ("async", False)])
def test_a_started_call_is_waited_for_where_a_gpu_is_to_do_it(note: str, found: bool) -> None:
    made = Made(3)
    for rank in range(3):
        made.call(rank, "barrier", WORLD)
    for rank in range(2):
        made.begin(rank, "all_reduce", WORLD, note=note)
        made.call(rank, "wait", note="for all_reduce #2 on world[0,1,2]")
    made.pause(10)
    findings = diagnose(made.trace(), deadline_s=5.0, now_ns=made.now_ns)
    assert [(f.kind, f.ranks) for f in findings] == ([(Kind.MISSING_CALL, (2,))] if found else [])


def test_connections_that_ended_follow_from_an_exception_that_says_more() -> None:
    made = Made(3)
    for rank, error in ((0, "RuntimeError: Connection closed by peer"), (1, "RuntimeError: invalid output list")):
        made.call(rank, "all_gather", WORLD, error=error)
        made.instant(rank, "exception", error=error)
    made.call(2, "all_gather", WORLD, error="RuntimeError: Connection reset by peer")
    made.instant(2, "exception", error="RuntimeError: Connection reset by peer")
    made.exit(0, 1, 2, status=1)
    first, *others = diagnose(made.trace())
    assert (first.ranks, first.consequence) == ((1,), False)
    assert [(f.ranks, f.consequence) for f in others] == [((0,), True), ((2,), True)]
