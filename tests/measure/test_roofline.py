"""Pins the cost model: bytes by hand, times by hand, crossovers, and that its numbers give back what was measured."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import pytest

from workbench.errors import ArgumentError
from workbench.measure import (
    Rates,
    find_crossover,
    find_rates,
    fit_line,
    link_bytes,
    memory_bytes,
    predict_us,
    published_figures,
    simulate_us,
)
from workbench.plan import Algorithm
from workbench.trace import Role, parse_comparison

ROOT = Path(__file__).parent.parent.parent
ROUND = Rates(
    device="round numbers",
    latency_us=2.0,
    link_gb_s=100.0,
    memory_gb_s=1000.0,
    hop_us=1.0,
    barrier_us=1.5,
    provenance=MappingProxyType({}),
)


@pytest.mark.parametrize(
    ("algorithm", "ranks", "link", "memory"),
    [
        (Algorithm.PUSH, 2, 1.0, 6.0),
        (Algorithm.PUSH, 8, 7.0, 18.0),
        (Algorithm.PULL, 2, 1.0, 5.0),
        (Algorithm.TWO_SHOT_PUSH, 2, 1.0, 6.0),
        (Algorithm.TWO_SHOT_PULL, 4, 1.5, 7.0),
        (Algorithm.TWO_SHOT_PULL, 8, 1.75, 7.5),
        (Algorithm.MULTICAST, 8, 1.125, 7.5),
    ],
)
def test_bytes_are_those_counted_by_hand(algorithm: Algorithm, ranks: int, link: float, memory: float) -> None:
    """As multiples of the message, for all-reduce + add + norm in one kernel."""
    assert link_bytes(algorithm, ranks, 1.0) == pytest.approx(link)
    assert memory_bytes(algorithm, ranks, 1.0) == pytest.approx(memory)


@pytest.mark.parametrize(
    ("algorithm", "ranks", "size", "us"),
    [
        (Algorithm.PUSH, 2, 0, 2.0),
        (Algorithm.PUSH, 2, 100_000, 3.0),  # 100 kB over 100 GB/s is 1 us; memory would take 0.6
        (Algorithm.PUSH, 4, 100_000, 5.0),
        (Algorithm.TWO_SHOT_PUSH, 4, 100_000, 4.5),  # a hop more, 150 kB
        (Algorithm.TWO_SHOT_PULL, 4, 100_000, 6.5),  # two barriers more
        (Algorithm.PULL, 2, 100_000, 4.5),
    ],
)
def test_a_time_is_latency_and_the_larger_of_two_transfers(
    algorithm: Algorithm, ranks: int, size: int, us: float
) -> None:
    assert predict_us(ROUND, algorithm, ranks=ranks, message_bytes=size) == pytest.approx(us)


def test_slow_memory_is_the_roof_where_it_is_slower_than_the_link() -> None:
    slow = Rates(**{name: getattr(ROUND, name) for name in Rates.__slots__} | {"memory_gb_s": 60.0})
    assert predict_us(slow, Algorithm.PUSH, ranks=2, message_bytes=100_000) == pytest.approx(12.0)  # 600 kB at 60 GB/s


def test_one_shot_gives_way_to_two_shot_where_the_bytes_outweigh_the_meeting() -> None:
    # 4 ranks: 3 S against 1.5 S + 3 us of barriers, at 100 GB/s: equal at 1.5 S = 300 kB
    assert find_crossover(ROUND, Algorithm.PUSH, Algorithm.TWO_SHOT_PULL, 4) == pytest.approx(200_000, abs=1)
    assert find_crossover(ROUND, Algorithm.PUSH, Algorithm.TWO_SHOT_PUSH, 4) == pytest.approx(66_666, abs=1)
    assert find_crossover(ROUND, Algorithm.PUSH, Algorithm.TWO_SHOT_PULL, 2) is None


def test_one_rank_has_no_time() -> None:
    with pytest.raises(ArgumentError, match="allowed: 2 and more"):
        predict_us(ROUND, Algorithm.PUSH, ranks=1, message_bytes=1)


def test_a_fit_gives_back_the_line_and_refuses_what_is_none() -> None:
    latency, rate = fit_line([(0, 2.0), (100_000, 3.0), (1_000_000, 12.0)])
    assert (latency, rate) == (pytest.approx(2.0), pytest.approx(100.0))
    for points in ([(1000, 5.0)], [(1000, 5.0), (2000, 4.0)]):
        with pytest.raises(ArgumentError, match="a fit needs two sizes"):
            fit_line(points)


def test_the_rates_of_the_h200_are_the_fit_to_the_stored_runs_and_within_six_percent_of_each_time() -> None:
    points = []
    for name in ("h7168", "h4096"):
        path = ROOT / "benchmarks" / "2026-11-29-h200x2" / f"{name}.json"
        stored = parse_comparison(path.read_text(), path.name)
        ours = [(row.tokens * stored.hidden * 2, row.column(Role.OURS)) for row in stored.rows]
        points += [(size, column.us.median) for size, column in ours if column is not None]
    assert len(points) == 26
    rates = find_rates("NVIDIA H200")
    assert rates is not None
    latency, rate = fit_line(points)
    assert (rates.latency_us, rates.link_gb_s) == (pytest.approx(latency, abs=0.001), pytest.approx(rate, abs=0.1))
    for size, us in points:
        assert simulate_us("NVIDIA H200", ranks=2, message_bytes=size) == pytest.approx(us, rel=0.06)
    assert simulate_us("NVIDIA A100", ranks=2, message_bytes=1 << 20) is None


def test_published_figures_say_whose_they_are_and_none_beats_the_model_by_half() -> None:
    rates = find_rates("NVIDIA H200")
    assert rates is not None
    figures = [f for f in published_figures() if f.hardware == "H100"]  # the same links
    assert len(figures) >= 8
    for figure in figures:
        simulated = predict_us(rates, figure.algorithm, ranks=figure.ranks, message_bytes=figure.message_bytes)
        assert figure.source
        assert 1.0 < figure.us / simulated < 3.0
