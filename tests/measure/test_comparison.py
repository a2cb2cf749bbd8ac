"""Pins the record of a comparison: it survives JSON, its spreads are those of its rounds, and bad files are refused."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.measure.made import comparison, row
from workbench.errors import ArgumentError
from workbench.trace import Role, Scenario, Spread, parse_comparison

ROOT = Path(__file__).parent.parent.parent
MADE = comparison(replace(row(8, 10.0, 20.0), wrong=(("bad", "sum: 3 differ"),), left_out=(("x", "not here"),)))


def test_a_comparison_survives_json() -> None:
    assert parse_comparison(json.dumps(MADE.to_json()), "x") == MADE


def test_a_spread_is_median_and_deciles_and_one_value_is_its_own() -> None:
    spread = Spread.of([float(n) for n in range(11)])
    assert (spread.median, spread.p10, spread.p90) == (5.0, 1.0, 9.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


def test_wrong_results_are_told_with_size_and_scenario() -> None:
    assert MADE.wrong == ("bad at 8 tokens (together): sum: 3 differ",)


def test_the_stored_runs_are_read_and_ours_is_the_faster_in_every_row() -> None:
    checked = 0
    for path in sorted((ROOT / "benchmarks").glob("*/h*.json")):
        stored = parse_comparison(path.read_text(), path.name)
        assert stored.finished
        assert stored.about["command"]
        for found in stored.rows:
            assert found.column(Role.OURS) is not None
            assert found.ratio is not None
            checked += found.ratio.p90 < 1 or found.scenario is not Scenario.TOGETHER
    assert checked >= 26


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("schema", 2, "schema is 2"),
        ("what", "sum", "what is 'sum'"),
        ("rows/0/scenario", "late", "allowed: one of together, skewed, gemm"),
        ("rows/0/tokens", 0, "tokens is 0"),
        ("rows/0/columns/custom/us/median", "fast", "median is no finite number"),
        ("rows/0/columns/custom/us/p10", 11, "p10, median and p90 must ascend"),
        ("rows/0/columns/custom/us/p90", -1, "p90 is -1"),
        ("rows/0/columns/custom/us/p90", 10**400, "p90 is an integer of 1329 bits"),
        ("rows/0/columns/custom/us/p90", 1e300, "p90 is 1e+300"),
        ("rows/0/best_peer", "custom", "best_peer is 'custom'; allowed: a column whose role is peer"),
        ("rows/0/best_peer", None, "a ratio needs our way and the best peer"),
        ("rows/0/columns/custom/role", "best", "allowed: one of ours"),
        ("rows/0/ratio/p50", 1, "unknown field 'p50'"),
        ("rows/0/speed", 1, "unknown field 'speed'"),
        ("about", [], "about is no object"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_field(path: str, value: Any, told: str) -> None:
    document = copy.deepcopy(MADE.to_json())
    *parents, last = path.split("/")
    place: Any = document
    for name in parents:
        place = place[int(name)] if isinstance(place, list) else place[name]
    place[last] = value
    with pytest.raises(ArgumentError) as refused:
        parse_comparison(json.dumps(document), "mine.json")
    assert told in str(refused.value)
    assert str(refused.value).startswith("mine.json")
