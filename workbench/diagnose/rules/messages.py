"""A send and the recv that takes it, of different sizes: paired by order, for each sender, receiver and group.

Example: world rank 0 sends [8, 2, 16] to world rank 1, which receives into [4, 2, 16].
Claim: `shape-mismatch`, both ranks. Equal numbers of bytes in other shapes are no fault. Tags are not recorded: where
the sizes only stand in another order, calls that went well are no finding, and others a likely one.
Evidence: the send and the recv.
Try: send the shape first, or compute it alike on both sides. gloo ends a receiver with too little room and leaves the
rest of a buffer with too much as it was; NCCL waits.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from math import prod

from workbench.diagnose.claim import Claim
from workbench.diagnose.finding import Certainty, Kind
from workbench.diagnose.program_order import group_key
from workbench.diagnose.scene import Scene
from workbench.diagnose.words import call_words, raised
from workbench.trace import Event, RankCall


def rule(scene: Scene) -> Iterator[Claim]:
    """Of each sender, receiver and group the first message that its recv does not fit."""
    sends: dict[tuple[object, int, int], list[RankCall]] = defaultdict(list)
    recvs: dict[tuple[object, int, int], list[RankCall]] = defaultdict(list)
    takes_any: set[int] = set()
    for rank, story in scene.ranks.items():
        for call in story.calls:
            event = call.event
            if event.op == "recv" and event.peer_world_rank is None:
                takes_any.add(rank)
            elif event.op == "send" and event.peer_world_rank is not None:
                sends[group_key(event.group), rank, event.peer_world_rank].append(call)
            elif event.op == "recv" and event.peer_world_rank is not None:
                recvs[group_key(event.group), event.peer_world_rank, rank].append(call)
    for way in sends.keys() & recvs.keys():
        _, *ends = way
        if ends[1] not in takes_any and all(scene.ranks[r].trace.drops.complete for r in ends):
            claim = _first_unequal(sends[way], recvs[way])
            if claim is not None:
                yield claim


def _first_unequal(sends: Sequence[RankCall], recvs: Sequence[RankCall]) -> Claim | None:
    sent, taken = [[_bits(c.event) for c in calls] for calls in (sends, recvs)]
    if None in (*sent, *taken):
        return None
    place = next((i for i, (a, b) in enumerate(zip(sent, taken, strict=False)) if a != b), None)
    if place is None:
        return None
    few, many = sorted((Counter(sent), Counter(taken)), key=Counter.total)
    reordered = few <= many  # by tags, as far as sizes tell
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
        + ("" if certainty is Certainty.IS else "; or compare tag= and the order of the calls on both sides"),
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
