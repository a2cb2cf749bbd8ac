"""A group that all its members begin to make and none gets: who looks where, and what is said where they do not differ.

Exact: code, kind, ranks, certainty. Traces by hand; tests/bugs has the same from a real program.
"""

from __future__ import annotations

import pytest

from tests.diagnose.made import START_NS, Made, group, site
from workbench.diagnose import Finding, diagnose

WORLD = group("world", 0, 1, 2)
PLACES = (
    ["meets at 29500", "meets at 29501", "meets at 29500"],
    ["meets at a on 1; store 1 under a", "meets at b on 1; store 2 under b", "meets at a on 1; store 3 under a"],
    ["store of the launcher, attempt 1", "store of the launcher, attempt 0", "store of the launcher, attempt 1"],
)


def told(made: Made) -> tuple[Finding, ...]:
    return diagnose(made.trace(), deadline_s=5, now_ns=START_NS + made.now_us * 1000)


@pytest.mark.parametrize("notes", PLACES, ids=["ports", "prefixes", "attempts"])
def test_ranks_that_look_for_each_other_at_different_places_are_told_apart(notes: list[str]) -> None:
    made = Made(3)
    for rank, note in enumerate(notes):
        made.begin(rank, "init_process_group", WORLD, note=f"no timeout given; {note}", site=site(5))
    made.pause(6)
    (finding,) = told(made)
    assert (finding.code, finding.kind, finding.ranks) == ("beginning.place", "rendezvous-partial", (1,))
    assert finding.certainty == "is"
    assert notes[1].split("; ")[0] in finding.message


def test_a_store_counts_its_number_in_each_process_and_tells_no_place() -> None:
    made = Made(3)
    for rank in range(3):
        made.begin(rank, "init_process_group", WORLD, note=f"meets at 29500; store {rank}")
    made.pause(6)
    (finding,) = told(made)
    assert (finding.code, finding.kind, finding.ranks) == ("stalled.beginning", "stalled", (0, 1, 2))


@pytest.mark.parametrize("op", ["init_process_group", "new_group"])
def test_a_group_that_nobody_gets_at_one_place_is_stalled_with_the_keys_that_are_waited_for(op: str) -> None:
    made = Made(3)
    for rank in range(3):
        made.begin(rank, op, WORLD)
        made.begin(rank, "store_wait", note=f"inside {op}; barrier:last")
    made.pause(6)
    (finding,) = told(made)
    assert (finding.code, finding.ranks, finding.certainty) == ("stalled.beginning", (0, 1, 2), "likely")
    assert "barrier:last" in finding.message
    assert op in finding.message


def test_within_the_deadline_and_after_a_beginning_that_ended_nothing_is_said() -> None:
    made = Made(3)
    begun = [made.begin(rank, "init_process_group", WORLD, note=PLACES[0][rank]) for rank in range(3)]
    made.pause(2)
    assert told(made) == ()
    for event in begun:
        made.end(event)
    made.pause(60)
    assert told(made) == ()


def test_a_rank_that_never_came_is_told_and_not_the_places_of_the_others() -> None:
    made = Made(3)
    for rank in (0, 1):
        made.begin(rank, "init_process_group", WORLD, note=PLACES[0][rank])
    made.instant(2, "exception", error="ValueError: no weights")
    made.pause(6)
    assert "beginning.place" not in [f.code for f in told(made)]


def test_a_wait_that_ran_out_at_another_place_belongs_to_that_place() -> None:
    made = Made(2)
    world = group("world", 0, 1)
    for rank in range(2):
        made.call(
            rank, "init_process_group", world, note=f"meets at {rank}", error="DistStoreError: Timed out after 9 s"
        )
    made.exit(0, 1, status=1)
    first = diagnose(made.trace())[0]
    assert (first.code, first.ranks) == ("beginning.place", (0, 1))
    assert "Timed out after 9 s" in first.message
