"""Pins when a row counts as a loss, and which baselines are refused."""

from __future__ import annotations

import pytest

from tests.measure.made import comparison, row
from workbench.errors import ArgumentError
from workbench.measure import find_losses
from workbench.trace import Scenario

BEFORE = comparison(row(1, 10.0, 20.0), row(64, 100.0, 120.0), row(1, 50.0, 60.0, Scenario.SKEWED))


@pytest.mark.parametrize(
    ("ours", "lost"),
    [
        ((10.0, 100.0, 50.0), []),
        ((10.3, 100.0, 50.0), []),  # 3 % slower, and each spread reaches 2 %: they touch
        ((10.5, 100.0, 50.0), [("together", 1)]),
        ((9.0, 90.0, 45.0), []),
        ((10.0, 150.0, 60.0), [("together", 64), ("skewed", 1)]),
    ],
)
def test_a_loss_is_a_row_whose_spread_lies_wholly_above_the_baselines(
    ours: tuple[float, float, float], lost: list[tuple[str, int]]
) -> None:
    now = comparison(row(1, ours[0], 20.0), row(64, ours[1], 120.0), row(1, ours[2], 60.0, Scenario.SKEWED))
    assert [(loss.scenario.value, loss.tokens) for loss in find_losses(now, BEFORE)] == lost


def test_a_loss_says_both_times_and_how_much() -> None:
    (loss,) = find_losses(comparison(row(64, 150.0, 120.0)), BEFORE)
    assert str(loss) == ("64 tokens (together): 150.00 us [147.00, 153.00], before 100.00 us [98.00, 102.00]: +50.0%")


def test_a_faster_peer_is_no_loss_of_ours() -> None:
    assert find_losses(comparison(row(1, 10.0, 2.0)), BEFORE) == ()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"device": "NVIDIA H100"}, "the baseline has device NVIDIA H200, this run NVIDIA H100"),
        ({"hidden": 7168}, "the baseline has hidden 4096, this run 7168"),
        ({"ranks": 4}, "the baseline has ranks 2, this run 4"),
    ],
)
def test_a_baseline_of_other_work_is_refused(change: dict[str, object], told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        find_losses(comparison(row(1, 10.0, 20.0), **change), BEFORE)  # type: ignore[arg-type] # one field each


def test_a_baseline_without_a_common_row_is_refused_and_both_are_named() -> None:
    with pytest.raises(ArgumentError, match=r"it has 1 \(together\), 64 \(together\), 1 \(skewed\), this run 2 \(to"):
        find_losses(comparison(row(2, 10.0, 20.0)), BEFORE)
