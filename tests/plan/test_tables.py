"""Pins what the shipped tables support and say at their edges, and that a table file is understood or refused by field.

Graph and eager rows are thresholds published for SGLang's second custom all-reduce, fused ones above two ranks those of
our cost model; both are defaults, not measurements of ours.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pytest

from workbench.documents import Document
from workbench.errors import ArgumentError
from workbench.plan import Standing, parse_table, shipped_tables, show_bytes
from workbench.plan.tables import BUILT_KERNELS, Algorithm, Mode


def shipped_document() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((files("workbench.plan") / "tables" / "sm90.json").read_text())
    return document


def test_supported_world_sizes_are_the_keys_of_the_tables() -> None:
    tables = shipped_tables()
    assert {arch: sorted(table.entries) for arch, table in tables.items()} == {
        "sm90": [2, 3, 4, 5, 6, 7, 8],
        "sm100": [2, 3, 4, 5, 6, 7, 8, 16],
        "sm103": [2, 3, 4, 5, 6, 7, 8, 16],
    }


def test_every_size_from_two_to_sixteen_is_a_row_or_a_reasoned_absence() -> None:
    checked = 0
    for table in shipped_tables().values():
        for ws in range(2, 17):
            assert (ws in table.entries) != (ws in table.absent)
            assert ws in table.entries or len(table.absent[ws]) > 20
            checked += 1
    assert checked == 45


def test_tables_tell_where_they_come_from() -> None:
    for table in shipped_tables().values():
        assert table.standing is Standing.DEFAULT  # published by others; nothing of ours was timed
        assert set(table.provenance) == {"device", "date", "driver", "source", "command"}
        assert all(table.provenance.values())


def test_only_two_hopper_gpus_have_measured_rows_and_say_where_they_come_from() -> None:
    measured = {
        (arch, ws, mode.value): [row.up_to_bytes for row in rows if row.standing is Standing.MEASURED]
        for arch, table in shipped_tables().items()
        for ws, entry in table.entries.items()
        for mode, rows in entry.rows.items()
        if any(row.standing is not None for row in rows)
    }
    assert measured == {("sm90", 2, "fused"): [58720256]}  # 4,096 tokens of 7168 in bfloat16
    entry = shipped_tables()["sm90"].entries[2]
    assert (entry.provenance["device"], entry.provenance["driver"]) == ("NVIDIA H200", "580.159.04")
    assert "benchmarks/2026-11-29-h200x2" in entry.provenance["command"]
    assert (entry.max_message_bytes, shipped_tables()["sm90"].entries[4].max_message_bytes) == (56 << 20, 16 << 20)


def test_some_rows_read_as_published() -> None:
    entry = shipped_tables()["sm100"].entries[4]
    assert [(r.algorithm.value, r.from_bytes, r.up_to_bytes) for r in entry.rows[Mode.GRAPH]] == [
        ("two_shot_push", 1179648, 8388608),
        ("push", 0, 1179648),
        ("two_shot_pull", 0, 134217728),
    ]
    entry = shipped_tables()["sm90"].entries[8]
    assert [(r.algorithm.value, r.from_bytes, r.up_to_bytes) for r in entry.rows[Mode.EAGER]] == [
        ("push", 0, 131072),
        ("multicast", 0, 134217728),
        ("two_shot_pull", 0, 134217728),
    ]
    assert entry.count_blocks(Algorithm.MULTICAST, sms=132, ws=8) == 16
    assert entry.count_blocks(Algorithm.PUSH, sms=132, ws=8) == 132


def test_fused_rows_of_three_ranks_and_more_follow_the_cost_model_in_algorithms_that_have_kernels() -> None:
    """326,700 * n / ((n - 1)(n - 2)) bytes, whole KiB below: one more meeting of 0.9 us at 363 GB/s against n - 1."""
    ends = {3: 478, 4: 212, 5: 132, 6: 95, 7: 74, 8: 60, 16: 24}
    checked = 0
    for table in shipped_tables().values():
        for ws, entry in table.entries.items():
            rows = [(r.algorithm, r.from_bytes, r.up_to_bytes, r.standing) for r in entry.rows[Mode.FUSED]]
            assert {algorithm for algorithm, *_ in rows} <= BUILT_KERNELS
            if ws > 2:
                assert rows == [
                    (Algorithm.PUSH, 0, ends[ws] << 10, None),
                    (Algorithm.TWO_SHOT_PUSH, ends[ws] << 10, 16 << 20, None),
                ]
                checked += 1
    assert checked == 6 + 7 + 7


def _change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    *parents, last = path.split("/")

    def apply(document: Any) -> None:
        for name in parents:
            document = document[int(name) if isinstance(document, list) else name]
        if value is None:
            del document[last]
        else:
            document[int(last) if isinstance(document, list) else last] = value

    return apply


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("schema", 2, "schema is 2"),
        ("standing", "unsupported", "an unsupported size is an absence"),
        ("standing", "tuned", "allowed: one of unsupported, default, measured"),
        ("provenance/driver", None, "provenance: field 'driver' is missing"),
        ("provenance/author", "x", "unknown field 'author'"),
        ("absent/16", None, "world size 16 must be a key of world_sizes, or of absent with its reason"),
        ("absent/8", "twice", "world size 8 must be a key"),
        ("absent/17", "too wide", "'17' is no world size; allowed: 2..16"),
        ("world_sizes/02", {}, "'02' is no world size"),
        ("world_sizes/8/graph/0/algorithm", "ring", "graph[0]: algorithm is 'ring'; allowed: one of push"),
        ("world_sizes/8/graph/0/up_to", "1.3", "up_to must be whole bytes"),
        ("world_sizes/8/graph/0/up_to", "lots", "up_to must be whole bytes"),
        ("world_sizes/8/graph/0/up_to", "9G", "up_to must be whole bytes"),
        ("world_sizes/8/graph/0/from", "1M", "from is above up_to"),
        ("world_sizes/8/blocks/push", "sms ** 9", "block count 'sms ** 9'"),
        ("world_sizes/8/blocks/push", None, "blocks has no push, which a row uses"),
        ("world_sizes/8/eager", None, "field 'eager' is missing"),
        ("max_message", 16, "max_message is 16"),
        ("world_sizes/2/provenance", None, "provenance is missing, and must say where a row that is measured"),
        ("world_sizes/2/provenance/driver", None, "provenance: field 'driver' is missing"),
        ("world_sizes/2/fused/0/standing", "tuned", "allowed: one of unsupported, default, measured"),
        ("world_sizes/2/fused/0/standing", "unsupported", "an unsupported size is an absence"),
        ("world_sizes/2/max_message", "lots", "max_message must be whole bytes"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_by_field(path: str, value: Any, told: str) -> None:
    document = copy.deepcopy(shipped_document())
    parse_table(Document(document, "mine.json"))
    _change(path, value)(document)
    with pytest.raises(ArgumentError) as refused:
        parse_table(Document(document, "mine.json"))
    assert str(refused.value).startswith(("mine.json: ", "block count"))
    assert told in str(refused.value)


def test_bytes_are_shown_exactly_where_that_is_short() -> None:
    assert [show_bytes(n) for n in (0, 1000, 14336, 1179648, 16777216, 129024, 1 << 31)] == [
        "0 bytes", "1000 bytes", "14 KiB", "1.125 MiB", "16 MiB", "126 KiB", "2 GiB",
    ]  # fmt: skip
    assert show_bytes(16777217) == "16.0 MiB"
