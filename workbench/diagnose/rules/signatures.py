"""Members of a group come to one call with different things: another op, root, reduce op, shape, dtype or layout.

Example: world rank 0 all-reduces float32[4] where world ranks 1-3 all-reduce float32[6], in call #7 of tp[0,1,2,3].
Claim: the members outside the largest party are at fault; without a largest party all of them are. Shapes differ where
the numbers of elements do, which is all that torch asks for; or where the same dimensions stand in another order.
`missing-call` where some members make the call of another line, past one that the others make and they made before;
`ordinal-drift` where fewer members make a call that the others never made: it is one too many, or those left it out.
Only the first such call of a group is told: after it the members no longer agree on anything.
Evidence: the call of two ranks of each party.
Try: agree on the field that differs before the call; each field says how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod

from workbench.diagnose.claim import Claim
from workbench.diagnose.finding import Certainty, Kind
from workbench.diagnose.parties import at_fault, parties, parties_words
from workbench.diagnose.program_order import Lacked, usual_call, was_made, went_past
from workbench.diagnose.rules.order import explain_difference, line
from workbench.diagnose.rules.parts import find_unequal_parts
from workbench.diagnose.scene import Meeting, Scene, marks
from workbench.diagnose.words import call_words, group_words, raised, ranks_words
from workbench.trace import BELOW_PYTHON, Event

EQUAL_SHAPES = frozenset(
    {
        *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter"),
        *("reduce_scatter_tensor", "gather", "scatter", "all_reduce_add_rms_norm"),
    }
)
"""Collectives whose input has one size on all members. The parts of an all-to-all may differ."""

ROWS = frozenset({"all_reduce_add_rms_norm"})
"""Collectives that read rows: to them a shape is more than its number of elements."""

UNEVEN_ON_NCCL = frozenset({"all_gather", "reduce_scatter", "gather", "scatter"})
"""Collectives on lists of tensors: NCCL sends parts of any size, gloo does not."""

EQUAL_DTYPES = EQUAL_SHAPES | {"all_to_all", "all_to_all_single"}

WRITES_IN_PLACE = frozenset({"all_reduce", "broadcast", "reduce", "scatter"})
"""Collectives that write a dense block at the start of the tensor they are given, whatever its strides (gloo)."""

_MOST_TEXT = 120  # characters of a line of the program


def _several(said: Set[object]) -> bool:
    return len(said) > 1


@dataclass(frozen=True, slots=True)
class _Field:
    """One thing on which members must agree.

    said: what is compared; None where the call says nothing of it. differ: whether what they said is a fault. shown:
    what is told of the call instead of what is compared.
    """

    code: str
    kind: Kind
    name: str
    said: Callable[[Event], object | None]
    fix: str
    differ: Callable[[Set[object]], bool] = _several
    shown: Callable[[Event], object] | None = None

    def words(self, event: Event) -> str:
        """What is told of the call."""
        return str((self.shown or self.said)(event))


def rule(scene: Scene) -> Iterator[Claim]:
    for meetings in scene.meetings.values():
        for place, meeting in enumerate(meetings):
            claim = _disagreement(scene, meetings, place) or find_unequal_parts(meeting) or _gaps(meeting)
            if claim is not None:
                yield claim
                break


def _disagreement(scene: Scene, meetings: Sequence[Meeting], place: int) -> Claim | None:
    meeting = meetings[place]
    events = {rank: call.event for rank, call in meeting.came.items()}
    if len({_signature(e) for e in events.values()}) == 1:  # as nearly always: cheaper than field by field
        return None
    for field in _FIELDS:
        said = {rank: field.said(event) for rank, event in events.items()}
        known = {rank: what for rank, what in said.items() if what is not None}
        if field.differ(set(known.values())):
            return explain_difference(meetings, place) or _left_out(scene, meeting) or _claim(meeting, field, known)
    if len({_dimensions(e) for e in events.values()}) > 1:  # no fault, unless their calls change places
        return explain_difference(meetings, place)
    return None


def _signature(event: Event) -> tuple[object, ...]:
    return (event.op, event.root_world_rank, event.reduce_op, event.shape, event.dtype, event.stride_class)


def _claim(meeting: Meeting, field: _Field, said: Mapping[int, object]) -> Claim:
    found = parties(said)
    words: dict[int, str] = {}
    for _, ranks in found:
        words |= dict.fromkeys(ranks, " or ".join(dict.fromkeys(field.words(meeting.came[r].event) for r in ranks)))
    lines = parties_words(words, {rank: f"({call_words(call.event)})" for rank, call in meeting.came.items()})
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


def _left_out(scene: Scene, meeting: Meeting) -> Claim | None:
    """Members at two lines, of which some left out the call of the others, or made one of their own in addition.

    Who went past a call that it made before has left it out. Where neither their past nor the program's text tells,
    nothing is said of calls that the program writes itself; of others either is possible.
    """
    made = [r for r, call in sorted(meeting.came.items()) if is_unwritten(scene, call.event)]
    late = sorted(set(meeting.came) - set(made))
    sides = [ranks for _, ranks in parties({r: line(c.event) for r, c in meeting.came.items()})]
    if len(sides) == 2:
        one, other = sides
        past = [pair for pair in ((one, other), (other, one)) if _has_left_out(scene, meeting, *pair)]
        if len(past) == 1 and len(past[0][0]) <= len(past[0][1]):
            return _omission(scene, meeting, *past[0], Certainty.IS)
        if len(past) == 1:
            return _addition(scene, meeting, past[0][1], past[0][0])
        unusual = [pair for pair in ((one, other), (other, one)) if _departs(scene, meeting, pair[0])]
        if made and len(unusual) == 1 and len(unusual[0][0]) <= len(unusual[0][1]):
            return _omission(scene, meeting, *unusual[0], Certainty.LIKELY)
        if set(other) <= set(made) and len(other) < len(one):
            own = meeting.came[other[0]].event
            if not any(was_made(scene.ranks[r].calls, own) for r in one):
                return _addition(scene, meeting, other, one)
        if made and not late:
            return _addition(scene, meeting, one, other, (*one, *other))
    lines = {line(meeting.came[r].event) for r in made}
    if not made or not late or any(line(meeting.came[r].event) in lines for r in late):
        return None
    return _omission(scene, meeting, late, made, Certainty.LIKELY)


def _has_left_out(scene: Scene, meeting: Meeting, ranks: Sequence[int], made: Sequence[int]) -> bool:
    """Whether `ranks` went past the call of `made`, which they made before."""
    event = meeting.came[made[0]].event
    lacked = Lacked(lambda e: (e.op, line(e)) == (event.op, line(event)), event.site)
    stories = {r: scene.ranks[r].calls for r in ranks}
    return all(
        went_past(scene.source, calls, meeting.came[r], lacked) and any(lacked.is_one(c.event) for c in calls)
        for r, calls in stories.items()
    )


def _departs(scene: Scene, meeting: Meeting, ranks: Sequence[int]) -> bool:
    """Whether these ranks made another call before where they now make this one."""
    return all(usual_call(scene.ranks[r].calls, meeting.came[r]) is not None for r in ranks)


def _omission(scene: Scene, meeting: Meeting, late: Sequence[int], made: Sequence[int], certainty: Certainty) -> Claim:
    event, instead = meeting.came[made[0]].event, meeting.came[late[0]].event
    where = f"make{'s' * (len(made) == 1)}{_in_text(scene, event)}"
    noun = "gradient sum" if _is_gradient(scene, event) else event.op
    fix = same_steps(scene, event)
    return Claim.about(
        meeting.came.values(),
        code="call.left-out",
        kind=Kind.MISSING_CALL,
        ranks=late,
        message=f"{ranks_words(late)} left out the {noun} that {ranks_words(made)} {where}, "
        f"{call_words(event)}, {meeting}: it met {call_words(instead)}.{raised(meeting.came.values())}",
        shown=(meeting.came[r] for r in (*made[:2], *late[:2])),
        certainty=certainty,
        fix=fix
        if certainty is Certainty.IS
        else f"{fix}; if {call_words(instead)} is one call more, make it on every member or on none",
    )


def _addition(
    scene: Scene, meeting: Meeting, few: Sequence[int], others: Sequence[int], at_fault: Sequence[int] = ()
) -> Claim:
    """`few` make a call that `others`, no fewer, do not: one too many, or left out by the others."""
    event, instead = meeting.came[few[0]].event, meeting.came[others[0]].event
    return Claim.about(
        meeting.came.values(),
        code="call.extra",
        kind=Kind.ORDINAL_DRIFT,
        ranks=at_fault or few,
        message=f"{ranks_words(few)} made {call_words(event)}{_in_text(scene, event)} as {meeting}, where "
        f"{ranks_words(others)} made {call_words(instead)}{_in_text(scene, instead)}: one call more on "
        f"{ranks_words(few)}, or one that {ranks_words(others)} left out.{raised(meeting.came.values())}",
        shown=(meeting.came[r] for r in (*few[:2], *others[:2])),
        certainty=Certainty.LIKELY,
        fix=f"make {call_words(event)} on every member or on none, and as many steps on each",
    )


def same_steps(scene: Scene, event: Event) -> str:
    """What to try where a member came to fewer of the calls that a step makes below its line."""
    if _is_gradient(scene, event):
        return (
            "sum gradients as often on every rank: no_sync() on all ranks or on none, and the same number of batches "
            "for each, or the loop in DistributedDataParallel.join()"
        )
    if is_unwritten(scene, event):
        fix = "run this line as often on every rank: the same number of batches for each, and no rank's `if` around it"
        join = "; for gradients of fewer batches there is DistributedDataParallel.join()"
        return fix if _text(scene, event) else f"{fix}{join}"
    return "make the call on every member, with nothing to add where there is nothing"


def _is_gradient(scene: Scene, event: Event) -> bool:
    return event.op == "all_reduce" and BELOW_PYTHON in marks(event) and ".backward(" in _text(scene, event)


def _in_text(scene: Scene, event: Event) -> str:
    text = _text(scene, event)
    return f" in `{text[:_MOST_TEXT]}`" if text and is_unwritten(scene, event) else ""


def is_unwritten(scene: Scene, event: Event) -> bool:
    """Whether a library issued the call below a line that does not say so itself: C++, or what torch has in Python."""
    text = _text(scene, event)
    return bool(text or BELOW_PYTHON in marks(event)) and event.op.replace("_", "") not in text.replace("_", "")


def _text(scene: Scene, event: Event) -> str:
    return "" if event.site is None else scene.source(event.site.file, event.site.line).strip()


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


def _dimensions(event: Event) -> tuple[int, ...] | None:
    """The shape without dimensions of 1, which change nothing in memory."""
    if event.shape is None or event.op not in EQUAL_SHAPES:
        return None
    if event.op in UNEVEN_ON_NCCL and "nccl" in (event.path or ""):
        return None
    return tuple(n for n in event.shape if n != 1)


def _size(event: Event) -> object | None:
    """The number of elements: memory is taken as it lies, so [2, 8] may meet [16]."""
    dimensions = _dimensions(event)
    return dimensions if dimensions is None or event.op in ROWS else prod(dimensions)


def _transposed(said: Set[object]) -> bool:
    """Whether two of these have the same dimensions in another order: their elements do not mean the same."""
    shapes = [shape for shape in said if isinstance(shape, tuple)]
    return len({tuple(sorted(shape)) for shape in shapes}) < len(shapes)


def _shape_words(event: Event) -> object:
    return list(event.shape or ())


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
        _size,
        "agree on the shape first: pad to the largest, or exchange the sizes",
        shown=_shape_words,
    ),
    _Field(
        "call.shape",
        Kind.SHAPE_MISMATCH,
        "the shape",
        _dimensions,
        "pass the dimensions in one order on every member: the elements meet as they lie in memory",
        differ=_transposed,
        shown=_shape_words,
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
