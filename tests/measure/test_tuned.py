"""Pins what becomes of measured rows in a table: won sizes only, measured only where timed, read back by the plan."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.measure.made import comparison, row
from workbench.documents import Document
from workbench.errors import ArgumentError
from workbench.measure import tuned_table
from workbench.plan import Mode, Standing, parse_table

# hidden 4096 in bfloat16: 8 KiB a token
WON = comparison(row(1, 2.6, 4.0), row(64, 4.1, 5.0), row(1024, 27.0, 36.0))


def tuned(*comparisons: Any) -> dict[str, Any]:
    return tuned_table(comparisons, command="workbench tune")


def test_sizes_that_were_won_are_one_measured_row_from_zero_bytes_on() -> None:
    entry = tuned(WON)["world_sizes"]["2"]
    assert entry["fused"] == [{"algorithm": "push", "up_to": "8M", "standing": "measured"}]
    assert entry["graph"] == [{"algorithm": "push", "up_to": "8M"}]  # the sum alone was not compared
    assert entry["max_message"] == "8M"
    assert entry["provenance"]["driver"] == "580.1"
    assert "commit abc" in entry["provenance"]["source"]


def test_sizes_that_were_lost_are_in_no_row() -> None:
    lost_in_between = comparison(row(1, 2.6, 4.0), row(64, 6.0, 5.0), row(512, 15.0, 18.0), row(1024, 40.0, 36.0))
    assert tuned(lost_in_between)["world_sizes"]["2"]["fused"] == [
        {"algorithm": "push", "up_to": "8K", "standing": "measured"},
        {"algorithm": "push", "up_to": "4M", "from": "4M", "standing": "measured"},
    ]
    lost_first = comparison(row(1, 5.0, 4.0), row(64, 4.1, 5.0))
    assert tuned(lost_first)["world_sizes"]["2"]["fused"][0]["from"] == "512K"


def test_a_size_timed_twice_is_won_only_if_both_times() -> None:
    other = comparison(row(2, 6.0, 5.0), row(128, 5.0, 6.0), hidden=2048)  # 8 KiB and 512 KiB again
    for runs in ((WON, other), (other, WON)):
        assert tuned(*runs)["world_sizes"]["2"]["fused"][0]["from"] == "512K"


def test_a_size_without_our_way_is_not_won() -> None:
    assert tuned(comparison(row(1, 2.6, 4.0), row(64, None, 5.0)))["world_sizes"]["2"]["max_message"] == "8K"


def test_other_widths_come_from_the_cost_model_and_stay_defaults() -> None:
    document = tuned(WON)
    assert sorted(map(int, document["world_sizes"])) == [2, 3, 4, 5, 6, 7, 8]
    assert document["provenance"]["source"].startswith("simulated: cost model 2.5")
    table = parse_table(Document(json.loads(json.dumps(document)), "tuned"))
    assert table.entries[2].rows[Mode.FUSED][0].standing is Standing.MEASURED
    assert {row.standing for ws in range(3, 9) for rows in table.entries[ws].rows.values() for row in rows} == {None}
    assert (table.standing, table.entries[8].max_message_bytes) == (Standing.DEFAULT, 16 << 20)
    limits = [table.entries[ws].rows[Mode.FUSED][0].up_to_bytes for ws in range(3, 9)]
    assert limits == sorted(limits, reverse=True)  # more ranks, more bytes for one-shot


def test_an_unknown_device_gets_its_measured_width_alone() -> None:
    document = tuned(comparison(row(1, 30.0, 900.0), row(64, 300.0, 5000.0), device="CPU X", arch="cpu"))
    assert list(document["world_sizes"]) == ["2"]
    assert document["arches"] == ["cpu"]
    assert document["world_sizes"]["2"]["fused"] == [{"algorithm": "pull", "up_to": "512K", "standing": "measured"}]
    assert parse_table(Document(document, "tuned")).absent[4] == "neither measured nor in the cost model"


def test_runs_of_two_machines_and_runs_without_a_win_are_refused() -> None:
    with pytest.raises(ArgumentError, match="runs of different device: NVIDIA H100, NVIDIA H200"):
        tuned(WON, comparison(row(1, 2.6, 4.0), device="NVIDIA H100"))
    with pytest.raises(ArgumentError, match="faster than the best peer at no size"):
        tuned(comparison(row(1, 5.0, 4.0)))


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (comparison(row(1, 2.6, 4.0), ranks=1), "a run of 1 ranks; allowed: 2 to 16"),
        (comparison(row(1, 2.6, 4.0), ranks=17), "a run of 17 ranks"),
        (comparison(row(1, 2.6, 4.0), arch="my machine"), "arch is 'my machine'; allowed: cpu, or one such as sm90"),
        (comparison(row(1, 2.6, 4.0), dtype="int4"), "dtype"),
    ],
)
def test_a_run_that_nobody_could_have_made_is_refused(run: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        tuned(run)


def test_a_time_of_nothing_does_not_reach_the_cost_model() -> None:
    assert tuned(comparison(row(1, 0.0, 4.0), row(64, 4.1, 5.0)))["world_sizes"]["2"]["max_message"] == "512K"
