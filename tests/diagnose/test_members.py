"""Groups made by hand, beside a world: members are found by where they meet and what number each has there."""

from __future__ import annotations

from tests.diagnose.made import Made, group, site
from workbench.diagnose import Certainty, Finding, Kind, diagnose
from workbench.trace import BY_HAND, GroupInfo, find_members

PLACE = "leaders on 29500"


def _member(number: int, place: str = PLACE) -> GroupInfo:
    return group(BY_HAND, 0, 1, ordinal=number, label=place)


def _judged(made: Made) -> list[Finding]:
    made.pause(31)
    return list(diagnose(find_members(made.trace()), deadline_s=30.0, now_ns=made.now_ns))


def test_members_are_told_by_their_world_ranks() -> None:
    made = Made(4)
    for number, rank in enumerate((3, 1)):
        made.call(rank, "all_reduce", _member(number))
    made.begin(3, "all_reduce", _member(0), site=site(7))
    first = _judged(made)[0]
    assert (first.kind, first.ranks) == (Kind.MISSING_CALL, (1,))
    assert first.group is not None
    assert first.group.world_ranks == (3, 1)
    assert "world rank 3 came and still waits" in first.message
    assert {g.world_ranks for r in find_members(made.trace()).ranks for g in r.groups} == {(3, 1)}


def test_groups_of_the_same_members_are_told_apart_by_their_place_whatever_order_they_are_used_in() -> None:
    made = Made(2)
    for rank, places in enumerate((("a", "b"), ("b", "a"))):
        for place in places:
            made.call(rank, "all_reduce", _member(rank, place), shape=(8 if place == "a" else 4,))
    assert diagnose(find_members(made.trace())) == ()


def test_who_waits_where_not_all_members_are_known_is_told_and_nobody_is_blamed() -> None:
    for others in ((), ((1, 0),), ((1, 1), (2, 1))):  # nobody else; the same number twice; the other number twice
        made = Made(3)
        made.begin(0, "all_reduce", _member(0), site=site(7))
        for rank, number in others:
            made.call(rank, "all_reduce", _member(number))
        (finding,) = _judged(made)
        assert (finding.code, finding.kind, finding.ranks) == ("stalled.strangers", Kind.STALLED, (0,))
        assert finding.certainty is Certainty.LIKELY
        assert "world rank 0 waits in all_reduce in main (train.py:7), on a group made by hand" in finding.message
    made = Made(2)
    made.begin(0, "all_reduce", _member(0, place=""), site=site(7))
    made.call(1, "all_reduce", _member(1, place=""))
    assert [f.code for f in _judged(made)] == ["stalled.strangers"], "a group of which no place is known"


def test_roots_and_peers_are_told_by_their_world_ranks() -> None:
    made = Made(4)
    for number, rank in enumerate((2, 3)):
        made.call(rank, "broadcast", _member(number), root_group_rank=number, root_world_rank=number, shape=(8,))
    (finding,) = diagnose(find_members(made.trace()))
    assert finding.kind is Kind.ROOT_MISMATCH
    assert finding.ranks == (2, 3)
    made = Made(4)
    made.begin(3, "recv", _member(1), peer_world_rank=0, site=site(9))
    made.call(2, "barrier", _member(0))
    first = _judged(made)[0]
    assert first.ranks == (2,)
    assert "world rank 3 waits in recv in main (train.py:9) for world rank 2" in first.message
