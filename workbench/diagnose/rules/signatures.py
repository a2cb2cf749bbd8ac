"""Members of a group come to one call with different things: another op, root, reduce op, shape, dtype or layout.

Example: world rank 0 all-reduces float32[4] where world ranks 1-3 all-reduce float32[6], in call #7 of tp[0,1,2,3].
Claim: the members outside the largest party are at fault; without a largest party all of them are.
Only the first such call of a group is told: after it the members no longer agree on anything.
Evidence: the call of two ranks of each party.
Try: agree on the field that differs before the call; each field says how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from workbench.diagnose.claim import Claim
from workbench.diagnose.finding import Kind
from workbench.diagnose.parties import at_fault, parties, parties_words
from workbench.diagnose.rules.order import explain_difference
from workbench.diagnose.rules.parts import find_unequal_parts
from workbench.diagnose.scene import Meeting, Scene
from workbench.diagnose.words import call_words, group_words, raised
from workbench.trace import Event

EQUAL_SHAPES = frozenset(
    {
        *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter"),
        *("reduce_scatter_tensor", "gather", "scatter", "all_reduce_add_rms_norm"),
    }
)
"""Collectives whose input has one shape on all members. The parts of an all-to-all may differ."""

UNEVEN_ON_NCCL = frozenset({"all_gather", "reduce_scatter", "gather", "scatter"})
"""Collectives on lists of tensors: NCCL sends parts of any size, gloo does not."""

EQUAL_DTYPES = EQUAL_SHAPES | {"all_to_all", "all_to_all_single"}

WRITES_IN_PLACE = frozenset({"all_reduce", "broadcast", "reduce", "scatter"})
"""Collectives that write a dense block at the start of the tensor they are given, whatever its strides (gloo)."""


@dataclass(frozen=True, slots=True)
class _Field:
    """One thing on which members must agree."""

    code: str
    kind: Kind
    name: str
    said: Callable[[Event], object | None]
    fix: str


def rule(scene: Scene) -> Iterator[Claim]:
    for meetings in scene.meetings.values():
        for place, meeting in enumerate(meetings):
            claim = _disagreement(meetings, place) or find_unequal_parts(meeting) or _gaps(meeting)
            if claim is not None:
                yield claim
                break


def _disagreement(meetings: Sequence[Meeting], place: int) -> Claim | None:
    meeting = meetings[place]
    events = {rank: call.event for rank, call in meeting.came.items()}
    if len({_signature(e) for e in events.values()}) == 1:  # as nearly always: cheaper than field by field
        return None
    for field in _FIELDS:
        said = {rank: field.said(event) for rank, event in events.items()}
        known = {rank: what for rank, what in said.items() if what is not None}
        if len(set(known.values())) > 1:
            return explain_difference(meetings, place) or _claim(meeting, field, known)
    return None


def _signature(event: Event) -> tuple[object, ...]:
    return (event.op, event.root_world_rank, event.reduce_op, event.shape, event.dtype, event.stride_class)


def _claim(meeting: Meeting, field: _Field, said: Mapping[int, object]) -> Claim:
    found = parties(said)
    lines = parties_words(said, {rank: f"({call_words(call.event)})" for rank, call in meeting.came.items()})
    told = raised(meeting.came.values()) or (" Nothing was raised." if _all_left(meeting) else "")
    return Claim.about(
        meeting.came.values(),
        code=field.code,
        kind=field.kind,
        ranks=at_fault(said),
        message=f"{field.name} differs in {meeting}: {lines}.{told}",
        shown=(meeting.came[r] for _, ranks in found for r in ranks[:2]),
        fix=field.fix,
    )


def _gaps(meeting: Meeting) -> Claim | None:
    """A tensor with gaps, given to a collective that writes a dense block."""
    gaps = {
        rank: call
        for rank, call in meeting.came.items()
        if call.event.stride_class == "strided" and call.event.op in WRITES_IN_PLACE
    }
    if not gaps:
        return None
    first = next(iter(gaps.values())).event
    return Claim.about(
        gaps.values(),
        code="call.gaps",
        kind=Kind.LAYOUT_MISMATCH,
        ranks=gaps,
        message=f"{call_words(first)} on {group_words(meeting.group)}: the tensor of shape {list(first.shape or ())} "
        f"has gaps between its elements; the collective writes one dense block, over memory that is not the tensor's.",
        fix="pass a contiguous tensor, and copy the result back into the view",
    )


def _all_left(meeting: Meeting) -> bool:
    return not meeting.absent and all(c.end is not None for c in meeting.came.values())


def _shape(event: Event) -> object | None:
    """The shape without dimensions of 1, which change nothing in memory."""
    if event.shape is None or event.op not in EQUAL_SHAPES:
        return None
    if event.op in UNEVEN_ON_NCCL and "nccl" in (event.path or ""):
        return None
    return str([n for n in event.shape if n != 1])


def _layout(event: Event) -> object | None:
    """The order of dimensions where the library takes memory as it lies; a gather copies the tensor first."""
    return event.stride_class if event.op in WRITES_IN_PLACE and event.stride_class != "strided" else None


_FIELDS = (
    _Field(
        "call.op",
        Kind.OP_MISMATCH,
        "the operation",
        lambda e: e.op,
        "make every member issue the same collectives in the same order on this group",
    ),
    _Field(
        "call.root",
        Kind.ROOT_MISMATCH,
        "the root",
        lambda e: None if e.root_world_rank is None else f"world rank {e.root_world_rank}",
        "compute src or dst from what all members know alike, such as group_src=0",
    ),
    _Field(
        "call.reduce-op",
        Kind.REDUCE_OP_MISMATCH,
        "the reduce op",
        lambda e: e.reduce_op,
        "pass the same op= on every member",
    ),
    _Field(
        "call.shape",
        Kind.SHAPE_MISMATCH,
        "the shape",
        _shape,
        "agree on the shape first: pad to the largest, or exchange the sizes",
    ),
    _Field(
        "call.dtype",
        Kind.DTYPE_MISMATCH,
        "the dtype",
        lambda e: e.dtype if e.op in EQUAL_DTYPES else None,
        "cast to one dtype before the call on every member",
    ),
    _Field(
        "call.layout",
        Kind.LAYOUT_MISMATCH,
        "the order of dimensions in memory",
        _layout,
        "pass x.contiguous() on every member, and use what it holds afterwards",
    ),
)
