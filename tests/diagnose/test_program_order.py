"""Ranks that wait for each other in different calls: which of them left one out, by its past and by the program's text.

Exact: kind, ranks and consequence of every finding. What neither tells stays an order swap.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest

from tests.diagnose.made import Made, group, site
from workbench.diagnose import Kind, diagnose

PAIR, WORLD = group("tp", 0, 1), group("world", 0, 1, 2, ordinal=1)


def _source(text: str) -> Callable[[str, int], str]:
    lines = textwrap.dedent(text).splitlines(keepends=True)
    return lambda _file, line: lines[line - 1] if 0 < line <= len(lines) else ""


def _judge(made: Made, text: str = "") -> list[tuple[Kind, tuple[int, ...], bool]]:
    made.pause(31)
    found = diagnose(made.trace(), deadline_s=30.0, now_ns=made.now_ns, source=_source(text))
    return [(f.kind, f.ranks, f.consequence) for f in found]


def _stuck(first: int, second: int, function: str = "main") -> Made:
    """World rank 0 waits on the pair at line `first`, 1 and 2 on the world at line `second`."""
    made = Made(3)
    made.begin(0, "all_reduce", PAIR, site=site(first, function))
    for rank in (1, 2):
        made.begin(rank, "all_reduce", WORLD, site=site(second, function))
    return made


SKIPPED_BY_1 = [(Kind.MISSING_CALL, (1,), False), (Kind.MISSING_CALL, (0,), True)]


@pytest.mark.parametrize(
    ("text", "first", "second"),
    [
        ("def main():\n    if good:\n        pair(x)\n    world(x)\n", 3, 4),
        ("def main():\n    try:\n        pair(x)\n    except ValueError:\n        pass\n    world(x)\n", 3, 6),
        (
            "def main():\n    for x in y:\n        if not x:\n            continue\n        pair(x)\n    world(x)\n",
            5,
            6,
        ),
        ("def main():\n    with timer():\n        pair(x)\n        world(\n            x\n        )\n", 3, 5),
        ("def main():\n    while more():\n        pair(x)\n    else:\n        world(x)\n", 3, 5),
    ],
    ids=["if", "try", "continue", "with", "else"],
)
def test_a_rank_that_waits_further_on_in_the_same_function_left_the_call_out(
    text: str, first: int, second: int
) -> None:
    made = _stuck(first, second)
    found = _judge(made, text)
    assert [(kind, ranks) for kind, ranks, _ in found] == [
        (Kind.RENDEZVOUS_PARTIAL, (1,)),
        (Kind.RENDEZVOUS_PARTIAL, (0,)),
    ]
    assert [consequence for *_, consequence in found] == [False, True]


@pytest.mark.parametrize(
    ("text", "first", "second", "function"),
    [
        (
            "def main():\n    if a:\n        pair(x)\n        world(x)\n    else:\n        world(x)\n        pair(x)\n",
            3,
            6,
            "main",
        ),
        ("def main():\n    try:\n        pair(x)\n    except ValueError:\n        world(x)\n", 3, 5, "main"),
        (
            "def main():\n    match x:\n        case 1:\n            pair(x)\n        case 2:\n            world(x)\n",
            4,
            6,
            "main",
        ),
        ("def main():\n    for g in groups:\n        reduce(x, g)\n", 3, 3, "main"),
        ("def main(:\n    pair(x)\n    world(x)\n", 2, 3, "main"),
        ("", 2, 3, "main"),
    ],
    ids=["branches", "handler", "match", "line", "broken", "unknown"],
)
def test_what_neither_past_nor_text_tells_is_a_swap(text: str, first: int, second: int, function: str) -> None:
    assert _judge(_stuck(first, second, function), text)[0] == (Kind.ORDER_SWAP, (0, 1), False)


def _steps(made: Made, number: int) -> None:
    """Steps of all ranks: two calls on the pair, one on the world, in helpers of their own."""
    for _ in range(number):
        for rank in (0, 1, 2):
            for _ in range(2 if rank < 2 else 0):
                made.call(rank, "all_reduce", PAIR, site=site(10, "layer"))
            made.call(rank, "all_reduce", WORLD, site=site(20, "finish"))


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_rank_that_made_fewer_calls_than_in_the_step_before_left_one_out(steps: int) -> None:
    made = Made(3)
    _steps(made, steps)
    for rank in (0, 1):
        made.call(rank, "all_reduce", PAIR, site=site(10, "layer"))
    made.begin(0, "all_reduce", PAIR, site=site(10, "layer"))
    for rank in (1, 2):
        made.begin(rank, "all_reduce", WORLD, site=site(20, "finish"))
    assert _judge(made) == [(Kind.MISSING_CALL, (1,), False), (Kind.MISSING_CALL, (0,), True)]


def test_a_rank_that_went_on_to_the_next_step_left_out_the_end_of_this_one() -> None:
    """A step: world at line 2, then the pair at line 3. World rank 1 of three goes from the world to the world."""
    made = Made(3)
    for rank in (0, 1, 2):
        made.call(rank, "all_reduce", WORLD, site=site(3))
    made.begin(0, "all_reduce", PAIR, site=site(4))
    for rank in (1, 2):
        made.begin(rank, "all_reduce", WORLD, site=site(3))
    found = _judge(made, "def main():\n    for x in batches:\n        world(x)\n        pair(x)\n")
    assert found == [(Kind.RENDEZVOUS_PARTIAL, (1,), False), (Kind.MISSING_CALL, (0,), True)]


def test_a_rank_that_made_more_calls_than_a_step_has_left_out_the_end_of_the_step() -> None:
    made = Made(3)
    _steps(made, 3)
    for rank in (0, 1):
        for _ in range(2):
            made.call(rank, "all_reduce", PAIR, site=site(10, "layer"))
    made.begin(1, "all_reduce", PAIR, site=site(10, "layer"))
    for rank in (0, 2):
        made.begin(rank, "all_reduce", WORLD, site=site(20, "finish"))
    assert _judge(made) == [(Kind.MISSING_CALL, (1,), False), (Kind.MISSING_CALL, (0,), True)]


@pytest.mark.parametrize(("line", "function"), [(3, "main"), (15, "last")])
def test_a_send_that_a_stage_left_out_is_told_though_it_waits_in_a_later_sum(line: int, function: str) -> None:
    """Its peer waits in a recv of the same loop, which it was in before, or in one of another function."""
    text = (
        "def main():\n    for x in y:\n        recv(x)\n        if bad(x):\n            continue\n        send(x)\n"
        "    world(x)\n"
    )
    made, both = Made(2), group("world", 0, 1)
    for _ in range(2):
        made.call(0, "send", both, site=site(6), peer_world_rank=1)
        made.call(1, "recv", both, site=site(line, function), peer_world_rank=0)
    made.begin(1, "recv", both, site=site(line, function), peer_world_rank=0)
    made.begin(0, "all_reduce", both, site=site(7))
    assert _judge(made, text) == [(Kind.MISSING_CALL, (0,), False), (Kind.RENDEZVOUS_PARTIAL, (1,), True)]
