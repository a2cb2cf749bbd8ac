"""Which of several findings comes first: decided by what each rank did first, whichever rank was the quicker.

Exact: kind and ranks of all findings, in order, for every interleaving of the ranks' own steps that is tried.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.diagnose.made import Made, group, site
from workbench.diagnose import Kind, diagnose

A, B = group("tp", 0, 1), group("dp", 1, 2, ordinal=1)
WORLD = group("world", 0, 1, 2, ordinal=2)

Step = Callable[[Made], object]


def call(rank: int, info, line: int, **fields: object) -> Step:
    return lambda made: made.call(rank, "all_reduce", info, site=site(line), **fields)


def begin(rank: int, info, line: int, op: str = "all_reduce") -> Step:
    return lambda made: made.begin(rank, op, info, site=site(line))


def note(rank: int, op: str = "new_group", **fields: object) -> Step:
    return lambda made: made.instant(rank, op, **fields)


SCENES: dict[str, tuple[dict[int, list[Step]], list[tuple[Kind, tuple[int, ...]]]]] = {
    "a rank that is waited for waits itself for one that computes": (
        {0: [begin(0, A, 10)], 1: [note(1), begin(1, B, 20)], 2: [note(2), note(2), note(2)]},
        [(Kind.RENDEZVOUS_PARTIAL, (2,)), (Kind.RENDEZVOUS_PARTIAL, (1,))],
    ),
    "one rank differs in two calls on two groups": (
        {
            0: [call(0, A, 10, dtype="float16")],
            1: [call(1, A, 10), call(1, B, 20)],
            2: [call(2, B, 20, shape=(3,))],
        },
        [(Kind.DTYPE_MISMATCH, (0, 1)), (Kind.SHAPE_MISMATCH, (1, 2))],
    ),
    "a rank raises after a call in which another one differed": (
        {
            0: [call(0, WORLD, 10), note(0, "exception", error="ValueError: loss is nan", site=site(11))],
            1: [call(1, WORLD, 10, reduce_op="max"), begin(1, WORLD, 12, "barrier")],
            2: [call(2, WORLD, 10), begin(2, WORLD, 12, "barrier")],
        },
        [(Kind.REDUCE_OP_MISMATCH, (1,)), (Kind.PEER_EXCEPTION, (0,)), (Kind.MISSING_CALL, (0,))],
    ),
    "a rank is killed, and one of those that are waited for stands elsewhere": (
        {
            0: [begin(0, WORLD, 10)],
            1: [lambda made: made.exit(1, status=-9)],
            2: [begin(2, B, 20)],
        },
        [(Kind.PEER_DEAD, (1,)), (Kind.RENDEZVOUS_PARTIAL, (1, 2)), (Kind.RENDEZVOUS_PARTIAL, (1,))],
    ),
    "a call differs, and then a rank leaves out the next one": (
        {
            0: [call(0, A, 10, dtype="float16"), begin(0, WORLD, 20)],
            1: [call(1, A, 10), begin(1, WORLD, 20)],
            2: [note(2), note(2)],
        },
        [(Kind.DTYPE_MISMATCH, (0, 1)), (Kind.RENDEZVOUS_PARTIAL, (2,))],
    ),
}


@pytest.mark.parametrize("scene", SCENES)
@settings(max_examples=60, deadline=None)
@given(choices=st.randoms(use_true_random=False))
def test_what_ranks_did_first_comes_first_whoever_was_quicker(scene: str, choices: random.Random) -> None:
    steps, expected = SCENES[scene]
    made, left = Made(3), {rank: list(own) for rank, own in steps.items()}
    while any(left.values()):
        rank = choices.choice([r for r, own in left.items() if own])
        left[rank].pop(0)(made)
    made.pause(31)
    findings = diagnose(made.trace(), deadline_s=30.0, now_ns=made.now_ns)
    assert [(f.kind, f.ranks) for f in findings] == expected


def test_of_faults_that_have_nothing_to_do_with_each_other_the_earlier_comes_first() -> None:
    made, other = Made(4), group("tp", 2, 3)
    for info, line in ((other, 20), (A, 10)):
        for rank in info.world_ranks:
            made.call(rank, "all_reduce", info, site=site(line), dtype="float16" if rank % 2 else "float32")
    assert [f.ranks for f in diagnose(made.trace())] == [(2, 3), (0, 1)]


def test_ranks_that_wait_in_a_circle_are_found_behind_one_that_waits_for_another() -> None:
    """0 waits for 1 and 2 together; 1 for 3, which computes; 2 for 0: the circle is 0 and 2."""
    made, pair, back = Made(4), group("dp", 1, 3, ordinal=1), group("pp", 0, 2, ordinal=2)
    made.begin(0, "all_reduce", WORLD, site=site(10))
    made.begin(1, "all_reduce", pair, site=site(20))
    made.begin(2, "all_reduce", back, site=site(30))
    made.pause(31)
    first = diagnose(made.trace(), deadline_s=30.0, now_ns=made.now_ns)[0]
    assert (first.kind, first.ranks) == (Kind.ORDER_SWAP, (0, 2))
