"""Pins when a row counts as a loss and when as the machine's, and which baselines are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.measure.made import around, comparison, row
from workbench.errors import ArgumentError
from workbench.measure import Losses, find_losses, require_same
from workbench.trace import Column, Role, Row, Scenario

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
    assert [(loss.scenario.value, loss.tokens) for loss in find_losses(now, BEFORE).ours] == lost


def test_a_loss_says_both_times_and_how_much() -> None:
    (loss,) = find_losses(comparison(row(64, 150.0, 120.0)), BEFORE).ours
    assert str(loss) == ("64 tokens (together): 150.00 us [147.00, 153.00], before 100.00 us [98.00, 102.00]: +50.0%")


def test_a_faster_peer_is_no_loss_of_ours() -> None:
    assert find_losses(comparison(row(1, 10.0, 2.0)), BEFORE) == Losses(ours=(), shared=(), compared=1)


def test_what_slowed_every_peer_as_much_is_the_machine_and_no_loss_of_ours() -> None:
    now = comparison(row(1, 20.0, 40.0), row(64, 300.0, 180.0), row(1, 50.0, 90.0, Scenario.SKEWED))
    found = find_losses(now, BEFORE)
    assert [(loss.scenario.value, loss.tokens) for loss in found.shared] == [("together", 1)]
    assert [(loss.scenario.value, loss.tokens) for loss in found.ours] == [("together", 64)]  # three times, peers 1.5
    assert found.compared == 3


def test_one_peer_that_kept_its_time_is_enough_to_tell_that_it_is_us() -> None:
    steady = Column(name="gloo", label="gloo", role=Role.PEER, us=around(30.0))

    def with_steady(made: Row) -> Row:
        return replace(made, columns=(*made.columns, steady))

    before, now = comparison(with_steady(row(1, 10.0, 20.0))), comparison(with_steady(row(1, 20.0, 40.0)))
    assert len(find_losses(now, before).ours) == 1


def test_a_second_time_of_ours_that_did_not_grow_is_noise() -> None:
    def twice(first: float, second: float) -> Row:
        made = row(1, first, 20.0)
        return replace(made, columns=(*made.columns, Column(name="2", label="2", role=Role.AGAIN, us=around(second))))

    before = comparison(twice(10.0, 10.1))
    assert find_losses(comparison(twice(15.0, 10.1)), before).ours == ()
    assert len(find_losses(comparison(twice(15.0, 15.2)), before).ours) == 1


@pytest.mark.parametrize("us", [0.0, None])
def test_rows_without_a_time_of_ours_are_not_counted_as_compared(us: float | None) -> None:
    before = comparison(row(1, us, 20.0), row(64, 100.0, 120.0))
    now = comparison(row(1, 10.0, 20.0), row(64, 100.0, 120.0))
    assert find_losses(now, before).compared == 1
    assert find_losses(before, now).compared == 1
    with pytest.raises(ArgumentError, match="it has 64"):
        find_losses(comparison(row(1, 10.0, 20.0)), before)


def test_a_baseline_of_another_method_is_refused() -> None:
    before = comparison(row(1, 10.0, 20.0), calls="20")
    require_same(before, places=[(Scenario.TOGETHER, 1)], about={"calls": "20", "delay_us": 200.0})
    with pytest.raises(ArgumentError, match="timed with calls 20, this run 1"):
        require_same(before, places=[(Scenario.TOGETHER, 1)], about={"calls": "1"})


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
