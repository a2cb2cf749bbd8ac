"""Members that come to one call with different things. Exact: kind, ranks and the first call."""

from __future__ import annotations

import pytest

from tests.diagnose.made import Made, site
from tests.trace.made import call, group, trace
from workbench.diagnose import Certainty, Finding, Kind, diagnose

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


SIZED = ("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "gather")


def _met(op: str, *shapes: tuple[int, ...], calls: int = 1, **fields: object) -> tuple[Finding, ...]:
    """Each rank comes with a shape of its own, `calls` times."""
    members = group("tp", *range(len(shapes)))
    events = [
        e
        for n in range(1, calls + 1)
        for r, shape in enumerate(shapes)
        for e in call(r, members, n, 100 * n + r, 100 * n + 50, op=op, shape=shape, **fields)
    ]
    return diagnose(trace(events, ranks=range(len(shapes))))


@pytest.mark.parametrize("op", SIZED)
def test_shapes_of_as_many_elements_are_no_mismatch(op: str) -> None:
    assert _met(op, (16,), (2, 8), (2, 1, 8), (2, 2, 4)) == ()
    assert _met(op, (), (1,), (1, 1)) == ()
    assert [(f.kind, f.ranks) for f in _met(op, (16,), (2, 8), (2, 8, 2))] == [(Kind.SHAPE_MISMATCH, (2,))]


@pytest.mark.parametrize("op", SIZED)
def test_the_same_dimensions_in_another_order_are_a_mismatch(op: str) -> None:
    (finding,) = _met(op, (4, 6), (4, 6), (6, 1, 4))
    assert (finding.kind, finding.ranks) == (Kind.SHAPE_MISMATCH, (2,))
    assert ": [4, 6] (decode (model.py:41)) on world ranks 0,1, [6, 1, 4] (" in finding.message.replace(f"{op} in ", "")
    assert "dimensions in one order" in finding.fix


def test_a_fused_sum_and_norm_reads_rows_and_needs_one_shape() -> None:
    assert [f.kind for f in _met("all_reduce_add_rms_norm", (16,), (2, 8))] == [Kind.SHAPE_MISMATCH]
    assert _met("all_reduce_add_rms_norm", (1, 8), (8,)) == ()


def test_shapes_are_told_as_they_are() -> None:
    """A dimension of one is one, a number alone has none, and a party of two shapes is told with both."""
    assert ": [1] (" in _met("all_reduce", (1,), (4,))[0].message
    assert ", [1, 4] (" in _met("all_reduce", (1,), (1, 4))[0].message
    assert ": [] (" in _met("all_reduce", (), (4,))[0].message
    assert ": [2, 8] or [16] (" in _met("all_reduce", (2, 8), (16,), (3,))[0].message


def test_equal_sizes_that_change_places_are_an_order_swap() -> None:
    members = group("tp", 0, 1)
    events = []
    for rank, shapes in enumerate([((2, 6), (12,)), ((12,), (2, 6))]):
        for n, shape in enumerate(shapes, 1):
            events += call(rank, members, n, 100 * n + rank, 100 * n + 50, shape=shape)
    assert [f.kind for f in diagnose(trace(events, ranks=range(2)))] == [Kind.ORDER_SWAP]
    assert _met("broadcast", (2, 6), (12,), calls=3) == ()


STEPS = """\
def main():
    for batch in batches:
        loss = model(batch)
        loss.backward()
    dist.all_reduce(total)
"""
EXTRA = """\
def main():
    for batch in batches:
        if odd(batch):
            dist.all_reduce(count)
        loss.backward()
"""
WRITTEN = """\
def main():
    if first:
        dist.all_reduce(x)
    else:
        functional.all_reduce(y, "sum", group)
"""


def _met_gradients(text: str, *, below: int, own: int, op: str = "all_reduce", steps: int = 2) -> Finding:
    """0 and 2 make a call below Python at line `below`, where 1 makes one of its own at line `own`."""
    lines = text.splitlines(keepends=True)
    made, members = Made(3), group("world", 0, 1, 2)
    issued = {"note": "async; below Python", "shape": (2177,), "reduce_op": None, "site": site(below)}
    for _ in range(steps):
        for rank in range(3):
            made.call(rank, op, members, **issued)
    for rank in (0, 2):
        made.begin(rank, op, members, **issued)
    made.begin(1, "all_reduce", members, shape=(1,), site=site(own))
    return diagnose(made.trace(), source=lambda _, n: lines[n - 1] if 0 < n <= len(lines) else "")[0]


def test_a_rank_that_came_to_another_line_left_out_what_c_plus_plus_makes_for_the_others() -> None:
    found = _met_gradients(STEPS, below=4, own=5)
    assert (found.kind, found.ranks, found.certainty) == (Kind.MISSING_CALL, (1,), Certainty.IS)
    assert found.message.startswith(
        "world rank 1 left out the gradient sum that world ranks 0,2 make in `loss.backward()`, all_reduce in main "
        "(train.py:4), call #3 of world[0,1,2]: it met all_reduce in main (train.py:5)."
    )
    assert "the same number of batches" in found.fix
    assert "DistributedDataParallel.join()" in found.fix
    buffers = _met_gradients(STEPS, below=3, own=5, op="broadcast")
    assert (buffers.kind, buffers.ranks) == (Kind.MISSING_CALL, (1,))
    assert "left out the broadcast that world ranks 0,2 make in `loss = model(batch)`, broadcast in" in buffers.message


def test_a_call_that_a_rank_may_have_made_in_addition_is_likely_and_said_to_be() -> None:
    """It stands before the gradients of the same step, or nobody has the text."""
    for text, below, own in ((EXTRA, 5, 4), ("", 4, 5)):
        found = _met_gradients(text, below=below, own=own)
        assert (found.kind, found.ranks, found.certainty) == (Kind.MISSING_CALL, (1,), Certainty.LIKELY)
        assert f"if all_reduce in main (train.py:{own}) is one call more, make it on every member" in found.fix
    assert "one call more" not in _met_gradients(STEPS, below=4, own=5).fix


def test_a_functional_collective_is_a_call_of_its_own_line() -> None:
    found = _met_gradients(WRITTEN, below=5, own=3, steps=0)
    assert (found.kind, found.ranks) == (Kind.SHAPE_MISMATCH, (1,))


def test_gradients_of_one_line_that_differ_are_a_mismatch() -> None:
    found = _met_gradients(STEPS, below=4, own=4)
    assert (found.kind, found.ranks) == (Kind.SHAPE_MISMATCH, (1,))
