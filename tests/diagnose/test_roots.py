"""Roots that are no members, and places taken for world ranks. Exact: kind, ranks, certainty, the member meant."""

from __future__ import annotations

from tests.diagnose.made import Made, group, site
from workbench.diagnose import Certainty, Kind, diagnose

EVEN, ODD = group("tp", 0, 2), group("tp", 1, 3, ordinal=1)


def _broadcast(made: Made, root: dict[int, int], *, line: int = 12) -> None:
    """Every rank broadcasts in its group from root[rank]; torch refuses a root that is no member."""
    for rank in range(4):
        info = (EVEN, ODD)[rank % 2]
        inside = root[rank] in info.world_ranks
        error = "" if inside else f"ValueError: Global rank {root[rank]} is not part of group"
        made.call(rank, "broadcast", info, root_world_rank=root[rank], site=site(line), error=error)


def test_a_root_outside_is_told_with_the_member_that_may_be_meant() -> None:
    made = Made(4)
    _broadcast(made, dict.fromkeys(range(4), 1))
    outside, place = diagnose(made.trace())
    assert (outside.kind, outside.ranks, outside.certainty) == (Kind.WRONG_ROOT, (0, 2), Certainty.IS)
    assert "names world rank 1 as root of tp[0,2]" in outside.message
    assert "the member at place 1 is world rank 2" in outside.message
    assert "ValueError: Global rank 1 is not part of group" in outside.message
    assert (place.kind, place.ranks, place.certainty) == (Kind.WRONG_ROOT, (1, 3), Certainty.LIKELY)
    assert "place 1 may be meant, which is world rank 3 here" in place.message


def test_roots_that_are_members_are_no_finding_whatever_their_place() -> None:
    made = Made(4)
    _broadcast(made, {0: 0, 2: 0, 1: 3, 3: 3})
    _broadcast(made, {0: 2, 2: 2, 1: 1, 3: 1})
    made.exit(0, 1, 2, 3)
    assert diagnose(made.trace()) == ()


def test_the_first_members_of_groups_are_not_suspected_because_another_line_is_wrong() -> None:
    made = Made(4)
    _broadcast(made, {0: 1, 2: 1, 1: 3, 3: 3}, line=12)
    _broadcast(made, {0: 0, 2: 0, 1: 1, 3: 1}, line=20)
    assert [(f.kind, f.ranks) for f in diagnose(made.trace())] == [(Kind.WRONG_ROOT, (0, 2))]


def _refused_and_caught(*survivors: int) -> Made:
    """Four ranks broadcast from 7, which none of their groups has; the survivors make another call after it."""
    made = Made(4)
    _broadcast(made, dict.fromkeys(range(4), 7))
    for rank in survivors:
        made.call(rank, "all_reduce", (EVEN, ODD)[rank % 2], site=site(30))
    return made


def test_a_root_that_every_rank_was_refused_and_got_over_is_no_finding() -> None:
    made = _refused_and_caught(0, 1, 2, 3)
    assert diagnose(made.trace()) == ()
    made.exit(0, 1, 2, 3)
    assert diagnose(made.trace()) == ()


def test_a_root_that_the_program_got_over_is_told_beside_what_went_wrong_later() -> None:
    made = _refused_and_caught(0, 1, 2, 3)
    made.begin(0, "barrier", EVEN, site=site(40))
    made.exit(2)
    findings = diagnose(made.trace())
    assert [(f.kind, f.ranks) for f in findings] == [
        (Kind.MISSING_CALL, (2,)),
        (Kind.WRONG_ROOT, (0, 1, 2, 3)),
    ]
    assert "Global rank 7 is not part of group" in findings[1].message


def test_a_root_that_ended_one_of_the_ranks_is_told_first() -> None:
    made = _refused_and_caught(0, 1, 2)
    made.exit(3, status=1)
    first = diagnose(made.trace())[0]
    assert (first.kind, first.ranks) == (Kind.WRONG_ROOT, (0, 1, 2, 3))


def test_a_root_that_one_group_was_refused_and_another_took_is_told_though_it_was_caught() -> None:
    made = Made(4)
    _broadcast(made, dict.fromkeys(range(4), 1))
    made.exit(0, 1, 2, 3)
    assert [(f.kind, f.ranks) for f in diagnose(made.trace())] == [
        (Kind.WRONG_ROOT, (0, 2)),
        (Kind.WRONG_ROOT, (1, 3)),
    ]
