"""What a first difference comes from: calls that changed places, were left out, or were made in addition."""

from __future__ import annotations

import pytest

from tests.diagnose.made import Made, group, site
from workbench.diagnose import Certainty, Kind, diagnose

PAIR = group("tp", 0, 1)
TRIPLE = group("tp", 0, 1, 2)


def _calls(made: Made, rank: int, info, *calls: tuple[int, tuple[int, ...]], function: str = "main") -> None:
    for line, shape in calls:
        made.call(rank, "all_reduce", info, site=site(line, function), shape=shape)


def test_shapes_that_change_places_are_a_swap_and_no_mismatch() -> None:
    made = Made(3)
    for rank in range(3):
        lines = [(10, (2, 6)), (11, (6, 2))]
        _calls(made, rank, TRIPLE, *(lines[::-1] if rank == 1 else lines))
    (finding,) = diagnose(made.trace())
    assert (finding.kind, finding.ranks, finding.certainty) == (Kind.ORDER_SWAP, (1,), Certainty.IS)
    assert "the same 2 calls in two orders" in finding.message


def test_equal_shapes_that_change_places_in_two_functions_are_a_likely_swap() -> None:
    made = Made(2)
    for rank, functions in enumerate((("loss", "tokens"), ("tokens", "loss"))):
        for function in functions:
            made.call(rank, "all_reduce", PAIR, site=site(10 if function == "loss" else 20, function))
    (finding,) = diagnose(made.trace())
    assert (finding.kind, finding.ranks, finding.certainty) == (Kind.ORDER_SWAP, (0, 1), Certainty.LIKELY)


def test_equal_shapes_that_change_places_in_two_branches_are_told_by_the_text_of_their_lines() -> None:
    made = Made(2)
    _calls(made, 0, PAIR, (10, (4,)), (11, (4,)))
    _calls(made, 1, PAIR, (13, (4,)), (14, (4,)))
    text = {10: "a = all_reduce(x, op)", 11: "b = all_reduce(y)", 13: "a = all_reduce(y)", 14: "b = all_reduce(x)"}
    assert diagnose(made.trace()) == ()
    (finding,) = diagnose(made.trace(), source=lambda _file, line: text[line])
    assert (finding.kind, finding.certainty) == (Kind.ORDER_SWAP, Certainty.LIKELY)


def test_leader_and_followers_at_lines_of_their_own_are_no_finding() -> None:
    made = Made(3)
    for step in range(4):
        for rank in range(3):
            function = "lead" if rank == step % 3 else "follow"
            made.call(rank, "broadcast", TRIPLE, root_world_rank=step % 3, site=site(len(function), function))
    made.exit(0, 1, 2)
    assert diagnose(made.trace()) == ()


def test_a_call_left_out_is_seen_by_the_shapes_that_follow() -> None:
    made = Made(3)
    for rank in range(3):
        lines = [(10, (4,)), (11, (6,)), (12, (8,))]
        _calls(made, rank, TRIPLE, *(lines[1:] if rank == 2 else lines))
    finding = diagnose(made.trace())[0]
    assert (finding.kind, finding.ranks) == (Kind.MISSING_CALL, (2,))
    assert "world rank 2 left out all_reduce in main (train.py:10)" in finding.message


def test_one_line_with_two_shapes_stays_a_mismatch() -> None:
    made = Made(2)
    _calls(made, 0, PAIR, (10, (4,)), (10, (6,)))
    _calls(made, 1, PAIR, (10, (6,)), (10, (6,)))
    assert [(f.kind, f.ranks) for f in diagnose(made.trace())] == [(Kind.SHAPE_MISMATCH, (0, 1))]


def test_a_rank_that_makes_one_call_more_a_step_drifts() -> None:
    made = Made(2)
    _calls(made, 0, PAIR, *[(10, (4,))] * 10)
    _calls(made, 1, PAIR, *[(10, (4,))] * 7, (20, (4,)), (10, (4,)), (20, (4,)))
    made.begin(1, "all_reduce", PAIR, site=site(10), shape=(4,))
    made.exit(0)
    (finding,) = diagnose(made.trace())
    assert (finding.kind, finding.ranks) == (Kind.ORDINAL_DRIFT, (1,))
    assert "all_reduce in main (train.py:20)" in finding.message


def test_one_call_more_at_the_end_is_a_call_that_the_other_misses() -> None:
    made = Made(2)
    _calls(made, 0, PAIR, (10, (4,)))
    _calls(made, 1, PAIR, (10, (4,)))
    made.begin(0, "all_reduce", PAIR, site=site(11), shape=(4,))
    made.exit(1)
    assert [(f.kind, f.ranks) for f in diagnose(made.trace())] == [(Kind.MISSING_CALL, (1,))]


@pytest.mark.parametrize(("line", "certainty"), [(10, Certainty.IS), (11, Certainty.LIKELY)])
def test_two_groups_entered_in_opposite_order_wait_in_a_circle(line: int, certainty: Certainty) -> None:
    """From one line, first calls of all: no other call was left out. From two, one may have been."""
    made = Made(3)
    tp, ep = group("tp", 0, 1), group("ep", 0, 1, 2, ordinal=1)
    made.begin(0, "all_reduce", tp, site=site(10))
    made.begin(1, "all_reduce", ep, site=site(line))
    made.begin(2, "all_reduce", ep, site=site(line))
    first = diagnose(made.trace())[0]
    assert (first.kind, first.ranks, first.certainty) == (Kind.ORDER_SWAP, (0, 1), certainty)
    assert "world rank 0 waits in all_reduce in main (train.py:10) on tp[0,1] for world rank 1" in first.message
    assert "left a call out before, or made one too many" in first.fix
