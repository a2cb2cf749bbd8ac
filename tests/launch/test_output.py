"""Pins how ranks are named and chosen, and how their output becomes one text. No process is started."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from IPython.core.error import UsageError

from workbench import GroupMap
from workbench.errors import ArgumentError, LayoutError
from workbench.launch.failure import RankError, RanksFailedError
from workbench.launch.output import merge_lines
from workbench.launch.selection import ranks_label, ranks_words, select_ranks
from workbench.magics import parse_line

MAP = GroupMap.custom({"tp": [[0, 1], [2, 3]], "cp": [[0, 2], [1, 3]], "pp": [[3, 1]]}, world_size=4)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, (0, 1, 2, 3)),
        ("all", (0, 1, 2, 3)),
        ("0,2", (0, 2)),
        ("1-3", (1, 2, 3)),
        ("3, 0-1", (0, 1, 3)),
        (2, (2,)),
        ([3, 0], (0, 3)),
        (np.int64(2), (2,)),
        (np.array([3, 0]), (0, 3)),
        (torch.tensor([3, 0]), (0, 3)),
        (range(1, 3), (1, 2)),
        ("tp:0", (0, 1)),
        ("cp:1", (1, 3)),
        ("pp", (1, 3)),
    ],
)
def test_ranks_are_chosen_by_number_run_kind_or_group(wanted: object, expected: tuple[int, ...]) -> None:
    assert select_ranks(wanted, 4, MAP) == expected  # type: ignore[arg-type]  # one parameter for all forms


@pytest.mark.parametrize(
    "wanted",
    ["4", "0,9", [-1], [True], True, [], "3-1", "tp:", "0;1", "0 2", "0-999999999", 1.5, [[0]], [1.0], object()],
)
def test_a_rank_that_is_not_there_is_refused_with_what_is(wanted: object) -> None:
    with pytest.raises(ArgumentError, match=r"0\.\.3|write 0,2"):
        select_ranks(wanted, 4, MAP)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ("9", "9"),
        (9, "9"),
        ("9,9", "9"),
        ([9, 9, -1], "9, -1"),
        ("2-9", "9"),
        ("8-9", "8, 9"),
        ([1, True], "True"),
        ([[0], [0]], "[0]"),
    ],
)
def test_what_is_refused_is_named_once(wanted: object, named: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        select_ranks(wanted, 4, MAP)  # type: ignore[arg-type]  # wrong on purpose
    assert str(refused.value) == f"ranks={wanted!r} names {named}; this cluster has world ranks 0..3"


def test_a_kind_needs_a_group_map_and_a_group_that_is_there() -> None:
    with pytest.raises(ArgumentError, match="no group map"):
        select_ranks("tp:0", 4, None)
    with pytest.raises(LayoutError, match="tp has 2 groups"):
        select_ranks("tp:2", 4, MAP)
    with pytest.raises(LayoutError, match="ep"):
        select_ranks("ep", 4, MAP)


def test_labels_shorten_runs() -> None:
    assert [ranks_label(r) for r in [(0,), (0, 1), (0, 2), (0, 1, 2, 3), (0, 1, 3)]] == [
        "0",
        "0-1",
        "0,2",
        "0-3",
        "0-1,3",
    ]
    assert (ranks_words((2,)), ranks_words((0, 1))) == ("world rank 2", "world ranks 0-1")


def test_equal_lines_are_shown_once_with_their_ranks() -> None:
    texts = {r: f"start\nrank {r}\nsum 10\n" for r in range(3)}
    assert merge_lines(texts) == "[0-2] start\n[0] rank 0\n[1] rank 1\n[2] rank 2\n[0-2] sum 10\n"


def test_a_table_of_each_rank_stays_together() -> None:
    assert merge_lines({0: "a0\nb0\n", 1: "a1\nb1\n"}) == "[0] a0\n[0] b0\n[1] a1\n[1] b1\n"


def test_the_text_does_not_depend_on_who_came_first() -> None:
    texts = {0: "x\n", 1: "y\nz\n", 2: "x\n"}
    backwards = dict(reversed(texts.items()))
    assert merge_lines(texts) == merge_lines(backwards) == "[0,2] x\n[1] y\n[1] z\n"


def test_a_carriage_return_overwrites_as_in_a_terminal_and_blank_lines_stay() -> None:
    assert merge_lines({0: "10%\r50%\r100%\n\ndone"}) == "[0] 100%\n[0]\n[0] done\n"


def test_the_line_behind_the_magic() -> None:
    assert parse_line("") == (None, None)
    assert parse_line("tp:0 --deadline 20") == ("tp:0", 20.0)
    assert parse_line("--deadline=0.5 0, 2") == ("0, 2", 0.5)
    assert parse_line("0 2") == ("0 2", None)
    for wrong in ("--deadline", "--deadline soon", "--dedline 3", "tp:'0"):
        with pytest.raises(UsageError, match="usage"):
            parse_line(wrong)


def test_the_first_failure_comes_first_and_its_echoes_once() -> None:
    def error(world_rank: int, name: str, message: str) -> RankError:
        return RankError(world_rank=world_rank, name=name, message=message, traceback=f"trace {world_rank}", when_s=0)

    echo = "gloo says: connection closed"
    told = RanksFailedError(
        (error(2, "ValueError", "x"), error(0, "RuntimeError", echo), error(1, "RuntimeError", echo))
    )
    assert str(told).splitlines() == [
        "world rank 2 failed first: ValueError: x",
        "trace 2",
        "then world ranks 0-1: RuntimeError: gloo says: connection closed",
        "a process group may be lost by this: cluster.rebuild() makes all of them anew",
    ]
    assert str(RanksFailedError((error(0, "E", "x"), error(1, "E", "x")))) == "world ranks 0-1 failed: E: x\ntrace 0"
