"""Pins the live comparison on real CPU ranks: every way right before it is timed, late ranks, chains, wrong results."""

from __future__ import annotations

import json

import pytest
import torch

from tests.forked import run_ranks
from tests.measure import bodies
from workbench.errors import ArgumentError
from workbench.measure import FusedSpec, Gives
from workbench.measure.case import CaseFailedError
from workbench.measure.fused import ratio_of
from workbench.measure.timing import from_last_arrival
from workbench.trace import Spread, parse_comparison


def test_every_way_of_this_machine_is_checked_timed_and_the_result_is_equal_on_each_rank() -> None:
    first, second = run_ranks(2, lambda rank: bodies.compare(bodies.SMALL))
    assert first[0]["rows"] == second[0]["rows"]
    assert first[1] == [(3, False), (6, True)]  # three scenarios a token count; known to whoever reads meanwhile
    result = parse_comparison(json.dumps(first[0]), "result")
    assert [(row.scenario.value, row.tokens) for row in result.rows] == [
        (scenario, tokens) for scenario in ("together", "skewed", "gemm") for tokens in (1, 5)
    ]
    assert result.wrong == ()
    together, skewed, gemm = (result.rows[i] for i in (0, 2, 4))
    roles = {column.name: column.role.value for column in together.columns}
    assert roles == {
        "shm": "ours",
        "gloo": "peer",
        "gloo+norm": "peer",
        "norm": "part",
        "shm again": "again",
        "shm sum": "part",
        "shm copied": "part",
    }
    assert {c.name for c in skewed.columns} == roles.keys() - {"norm"}  # it waits for nobody
    assert {c.name for c in gemm.columns} == roles.keys() - {"norm", "shm sum"} | {"gemms"}
    for row in result.rows:
        assert row.best_peer in ("gloo", "gloo+norm")
        assert row.ratio is not None
        assert all(0 < c.us.p10 <= c.us.median <= c.us.p90 for c in row.columns)


def test_the_time_with_a_late_rank_counts_from_its_arrival() -> None:
    """Nanoseconds (arrival, end) of three calls; the second rank comes late, and all is over 700, 600, 900 us after."""
    early = [(0, 200_700_000), (300_000_000, 500_500_000), (600_000_000, 800_900_000)]
    late = [(200_000_000, 200_650_000), (500_000_000, 500_600_000), (800_000_000, 800_800_000)]
    assert from_last_arrival([early, late]) == 700.0


def test_the_late_rank_is_late_at_every_call() -> None:
    early, late = run_ranks(2, lambda rank: bodies.arrivals(rank, delay_us=1_000_000))
    assert all(b > a for a, b in zip(early, late, strict=True))


@pytest.mark.parametrize(
    ("fault", "gives", "told"),
    [
        ("none", Gives.FUSED, ""),
        ("none", Gives.SUM, ""),
        ("one element", Gives.FUSED, "world rank 1: sum + residual: 1 of 128 elements differ"),
        ("one element", Gives.SUM, "world rank 1: sum: 1 of 128 elements differ"),
        ("nan", Gives.FUSED, "world rank 0: norm off by nan"),
        ("norm without eps and weight", Gives.FUSED, "world rank 0: norm off by"),
        ("residual on every rank", Gives.FUSED, "world rank 0: sum + residual:"),
        ("back to back", Gives.FUSED, "world rank 0: sum + residual: 1 of 128 elements differ"),
    ],
)
def test_a_wrong_way_is_told_alike_on_every_rank(fault: str, gives: Gives, told: str) -> None:
    first, second = run_ranks(2, lambda rank: bodies.check(fault, gives))
    assert first == second
    assert first.startswith(told)
    assert bool(first) == bool(told)


def test_one_element_of_a_norm_that_hides_in_the_whole_is_found() -> None:
    """One of 128 elements is off by 5 %: 0.4 % of the whole, where bfloat16 allows 0.8 %."""
    told = run_ranks(2, lambda rank: bodies.check("one element of the norm", dtype=torch.bfloat16))
    assert set(told) == {told[0]}
    assert told[0].startswith("world rank 0: an element of the norm is off by 0.0")


def test_a_way_that_is_wrong_only_with_a_late_rank_is_not_timed_with_one() -> None:
    together, skewed = run_ranks(2, lambda rank: bodies.compare_with_a_way_that_fails_when_late())[0]["rows"]
    assert (together["wrong"], "gloo" in together["columns"]) == ({}, True)
    assert skewed["wrong"]["gloo"].startswith("world rank 1: sum + residual:")
    assert "gloo" not in skewed["columns"]
    assert skewed["best_peer"] == "gloo+norm"


def test_no_ratio_is_claimed_where_a_time_cannot_be_told_from_nothing() -> None:
    assert ratio_of([2.0, 3.0], [4.0, 4.0]) == Spread(0.625, 0.525, 0.725)  # 0.5 and 0.75, round by round
    assert ratio_of([2.0, 3.0], [4.0, 0.0]) is None
    assert ratio_of([0.0, 3.0], [4.0, 4.0]) is None


def test_a_way_that_fails_on_one_rank_fails_on_all_and_the_rank_is_named() -> None:
    def body(rank: int) -> str:
        with pytest.raises(CaseFailedError) as failed:
            bodies.fail_on_one(rank)
        return str(failed.value)

    told = run_ranks(2, body)
    assert told == ["set-up of it: world rank 1: RuntimeError: no such kernel in this build"] * 2


def test_products_of_whole_numbers_are_exact() -> None:
    """One number from -8 to 8 a row, times -1, 0 or 1: any rank can make another's product without a message."""
    exact, largest, inner = bodies.products(1)
    assert (exact, inner) == (True, 24)
    assert 0 < largest <= 8


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"dtype": "int8"}, "allowed: bfloat16, float16, float32"),
        ({"hidden": 12}, "hidden=12; allowed: multiples of 8"),
        ({"tokens": ()}, "at least one of each"),
        ({"tokens": (0,)}, "from 1 on"),
        ({"ranks": 1}, "ranks=1; allowed: 2 to 16"),
        ({"ranks": 17}, "ranks=17"),
    ],
)
def test_a_spec_that_cannot_be_measured_is_refused(change: dict[str, object], told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        bodies.spec(**change)


def test_a_spec_survives_json() -> None:
    assert FusedSpec.from_json(bodies.SMALL.to_json()) == bodies.SMALL
