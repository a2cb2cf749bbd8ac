"""Members that come to one call with different things. Exact: kind, ranks and the first call."""

from __future__ import annotations

import pytest

from tests.trace.made import call, group, trace
from workbench.diagnose import Certainty, Kind, diagnose

TP = group("tp", 0, 1, 2)


def _one_differs(**fields: object) -> tuple:
    events = [e for r in range(3) for e in call(r, TP, 1, 10 + r, 20)]
    events += [e for r in range(3) for e in call(r, TP, 2, 30 + r, 40, **(fields if r == 1 else {}))]
    return diagnose(trace(events, ranks=range(3)))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Kind.OP_MISMATCH, {"op": "all_gather"}),
        (Kind.ROOT_MISMATCH, {"root_world_rank": 2}),
        (Kind.REDUCE_OP_MISMATCH, {"reduce_op": "max"}),
        (Kind.SHAPE_MISMATCH, {"shape": (64, 8)}),
        (Kind.DTYPE_MISMATCH, {"dtype": "float16"}),
        (Kind.LAYOUT_MISMATCH, {"stride_class": "dense(1,0)"}),
    ],
)
def test_the_member_that_differs_is_named(kind: Kind, fields: dict) -> None:
    base = {"root_world_rank": 0, "stride_class": "contiguous"}
    events = [e for r in range(3) for e in call(r, TP, 1, 10 + r, 20, **base)]
    events += [e for r in range(3) for e in call(r, TP, 2, 30 + r, 40, **{**base, **(fields if r == 1 else {})})]
    (finding,) = diagnose(trace(events, ranks=range(3)))
    assert (finding.kind, finding.ranks, finding.certainty) == (kind, (1,), Certainty.IS)
    assert finding.group == TP
    assert "decode (model.py:41)" in finding.message


def test_equal_calls_are_no_finding() -> None:
    assert _one_differs() == ()


def test_without_a_majority_both_parties_are_named() -> None:
    pair = group("tp", 0, 1)
    events = [*call(0, pair, 1, 10, 20, shape=(4,)), *call(1, pair, 1, 11, 20, shape=(6,))]
    (finding,) = diagnose(trace(events, ranks=range(2)))
    assert (finding.kind, finding.ranks) == (Kind.SHAPE_MISMATCH, (0, 1))
    assert "[4]" in finding.message
    assert "[6]" in finding.message


def test_dimensions_of_one_and_uneven_parts_on_nccl_are_no_mismatch() -> None:
    pair = group("tp", 0, 1)
    flat = [*call(0, pair, 1, 10, 20, shape=(1, 8)), *call(1, pair, 1, 11, 20, shape=(8,))]
    assert diagnose(trace(flat, ranks=range(2))) == ()
    uneven = {"op": "all_gather", "reduce_op": None}

    def told(path: str) -> list[Kind]:
        events = [e for r in range(2) for e in call(r, pair, 1, 10 + r, 20, shape=(4 + r,), path=path, **uneven)]
        return [f.kind for f in diagnose(trace(events, ranks=range(2)))]

    assert told("nccl") == []
    assert told("gloo") == [Kind.SHAPE_MISMATCH]


def test_a_tensor_with_gaps_is_told_where_the_library_writes_over_them() -> None:
    def told(op: str) -> list[Kind]:
        events = [e for r in range(3) for e in call(r, TP, 1, 10 + r, 20, op=op, stride_class="strided")]
        return [f.kind for f in diagnose(trace(events, ranks=range(3)))]

    assert {op: told(op) for op in ("all_reduce", "broadcast", "reduce", "scatter")} == {
        op: [Kind.LAYOUT_MISMATCH] for op in ("all_reduce", "broadcast", "reduce", "scatter")
    }
    assert told("all_gather") == told("gather") == told("reduce_scatter_tensor") == []
