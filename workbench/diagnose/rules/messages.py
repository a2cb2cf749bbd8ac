"""A send and the recv that was to take it: of different sizes, or under different tags. They are paired by order, for
each sender, receiver, group and tag; NCCL takes no notice of tags.

Example: world rank 0 sends [8, 2, 16] to world rank 1, which receives into [4, 2, 16].
Claim: `shape-mismatch`, both ranks. Equal numbers of bytes in other shapes are no fault; where the sizes only stand in
another order, calls that went well are no finding, and others a likely one. `op-mismatch`, both ranks: one waits in a
call under one tag, and of the other's calls one under another tag is left over.
Evidence: the send and the recv.
Try: send the shape first, or compute it alike on both sides. gloo ends a receiver with too little room and leaves the
rest of a buffer with too much as it was; NCCL waits. One tag for both sides, from one place in the program.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from workbench.diagnose.claim import Claim
from workbench.diagnose.finding import Certainty, Kind
from workbench.diagnose.program_order import group_key
from workbench.diagnose.scene import Scene, is_meeting, marks
from workbench.diagnose.words import call_words, raised
from workbench.trace import Event, RankCall

_Way = tuple[object, int, int]  # group, sender, receiver


def rule(scene: Scene) -> Iterator[Claim]:
    """Of each sender, receiver and group the first message that its recv does not fit."""
    sends: dict[_Way, dict[str, list[RankCall]]] = defaultdict(lambda: defaultdict(list))
    recvs: dict[_Way, dict[str, list[RankCall]]] = defaultdict(lambda: defaultdict(list))
    takes_any: set[int] = set()
    for rank, story in scene.ranks.items():
        for call in story.calls:
            event = call.event
            if event.op == "recv" and event.peer_world_rank is None:
                takes_any.add(rank)
            elif event.op == "send" and event.peer_world_rank is not None:
                sends[group_key(event.group), rank, event.peer_world_rank][_tag(event)].append(call)
            elif event.op == "recv" and event.peer_world_rank is not None:
                recvs[group_key(event.group), event.peer_world_rank, rank][_tag(event)].append(call)
    for way in sends.keys() & recvs.keys():
        _, *ends = way
        if ends[1] in takes_any or not all(scene.ranks[r].trace.drops.complete for r in ends):
            continue
        tags = sends[way].keys() & recvs[way].keys()
        unequal = [_first_unequal(sends[way][tag], recvs[way][tag]) for tag in sorted(tags)]
        yield from [claim for claim in unequal if claim is not None][:1]
        yield from _tags_apart(scene, sends[way], recvs[way])


def _tags_apart(
    scene: Scene, sends: Mapping[str, Sequence[RankCall]], recvs: Mapping[str, Sequence[RankCall]]
) -> Iterator[Claim]:
    """A call that waits under its tag, where the other side has one left over under another tag."""
    unmet = [_left_over(sends, recvs), _left_over(recvs, sends)]
    for mine, others in (unmet, reversed(unmet)):
        waits = [c for c in mine if scene.waits(c)]
        if waits and others and _cannot_come(scene, others[0], waits[0].event.world_rank):
            call, other = waits[0], others[0]
            tags = [f"{c.event.op} under {_tag(c.event) or 'tag 0'} ({call_words(c.event)})" for c in (call, other)]
            yield Claim.about(
                (call, other),
                code="message.tag",
                kind=Kind.OP_MISMATCH,
                ranks=(call.event.world_rank, other.event.world_rank),
                message=f"world rank {call.event.world_rank} waits for world rank {other.event.world_rank} in "
                f"{tags[0]}; left over there is {tags[1]}: under different tags they never meet.",
                certainty=Certainty.IS if scene.waits(other) else Certainty.LIKELY,
                fix="give both sides the same tag=, from one place in the program, and the calls one order",
            )
            return


def _cannot_come(scene: Scene, other: RankCall, world_rank: int) -> bool:
    """Whether the rank of `other` makes no further call before `world_rank` does: it has ended, or waits for it."""
    story = scene.ranks[other.event.world_rank]
    waits = [other, *([story.inside] if story.inside is not None else [])]
    return story.exit is not None or any(
        scene.waits(c) and (world_rank == c.event.peer_world_rank or _meets(c.event, world_rank)) for c in waits
    )


def _meets(event: Event, world_rank: int) -> bool:
    return is_meeting(event) and event.group is not None and world_rank in event.group.world_ranks


def _left_over(
    calls: Mapping[str, Sequence[RankCall]], counterparts: Mapping[str, Sequence[RankCall]]
) -> list[RankCall]:
    """Of each tag those beyond as many as the other side has of it."""
    return [c for tag in sorted(calls) for c in calls[tag][len(counterparts.get(tag, ())) :]]


def _tag(event: Event) -> str:
    """`tag 5`; "" for tag 0, and with NCCL, which takes the calls in their order."""
    if "nccl" in (event.path or ""):
        return ""
    return next((mark for mark in marks(event) if mark.startswith("tag ")), "")


def _first_unequal(sends: Sequence[RankCall], recvs: Sequence[RankCall]) -> Claim | None:
    sent, taken = [[_bits(c.event) for c in calls] for calls in (sends, recvs)]
    if None in (*sent, *taken):
        return None
    place = next((i for i, (a, b) in enumerate(zip(sent, taken, strict=False)) if a != b), None)
    if place is None:
        return None
    few, many = sorted((Counter(sent), Counter(taken)), key=Counter.total)
    reordered = few <= many  # by threads, as far as sizes tell
    if reordered and all(c.end is not None and not c.end.error for c in recvs):
        return None
    return _unequal(sends[place], recvs[place], Certainty.LIKELY if reordered else Certainty.IS)


def _unequal(send: RankCall, recv: RankCall, certainty: Certainty) -> Claim:
    source, target = send.event, recv.event
    both_left = all(c.end is not None and not c.end.error for c in (send, recv))
    return Claim.about(
        (send, recv),
        code="message.shape",
        kind=Kind.SHAPE_MISMATCH,
        ranks=(source.world_rank, target.world_rank),
        message=f"world rank {source.world_rank} sends {_words(source)} to world rank {target.world_rank} "
        f"({call_words(source)}), which receives {_words(target)} ({call_words(target)})."
        f"{raised((send, recv))}{' Nothing was raised.' if both_left else ''}",
        certainty=certainty,
        fix="give the recv a tensor of the size that is sent: send the shape first, or compute it alike on both sides"
        + ("" if certainty is Certainty.IS else "; or compare the order of the calls on both sides"),
    )


def _bits(event: Event) -> int | None:
    """The size of the tensor; None where it is not known."""
    width = 8 if event.dtype == "bool" else _width(event.dtype or "")
    return None if event.shape is None or width is None else prod(event.shape) * width


def _width(dtype: str) -> int | None:
    """Bits of an element, by its name: float32, int8, float8_e4m3fn."""
    found = re.match(r"[a-z]+(\d+)(?!.*_x\d)", dtype)
    return int(found[1]) if found else None


def _words(event: Event) -> str:
    return f"{event.dtype}{list(event.shape or ())}"
