"""A call that all members entered and in which nothing moves; a receive whose peer has sent, yet nothing that fits; a
group that cannot be destroyed.

Example: all four members are inside all_reduce of tp[0,1,2,3] for 30 s, with equal arguments.
Claim: `stalled`, all members: no rank stands out, so the cause lies below the calls (a link, a device, a stuck thread).
A rank that waits in destroy_process_group after it captured a collective: a CUDA graph still holds the communicator
(seen with NCCL 2.28, whose commDestroySync waits until no graph does).
Evidence: the calls that wait, and the peer's sends, or what was captured.
Try: the stacks and the links; for a receive, the tags and sizes of both sides.
"""

from __future__ import annotations

from collections.abc import Iterator

from workbench.diagnose.claim import Claim, Weight
from workbench.diagnose.finding import Certainty, Kind
from workbench.diagnose.rules.absent import COUNTERPART, made_between
from workbench.diagnose.scene import Scene, marks
from workbench.diagnose.words import call_words, ranks_words
from workbench.trace import STRANGERS, RankCall

_LEAST_NS = 1_000_000_000  # a call of a second is a call


def rule(scene: Scene) -> Iterator[Claim]:
    yield from _collectives(scene)
    yield from _pairs(scene)
    yield from _among_strangers(scene)
    yield from _leaving(scene)


def _collectives(scene: Scene) -> Iterator[Claim]:
    for meetings in scene.meetings.values():
        for meeting in meetings:
            waiting = [c for c in meeting.came.values() if scene.waits(c)]
            stood_ns = scene.end_ns - meeting.last_arrival_ns
            if meeting.absent or not waiting or stood_ns < max(_LEAST_NS, scene.patience_ns):
                continue
            event = meeting.first.event
            yield Claim.about(
                meeting.came.values(),
                code="stalled.call",
                kind=Kind.STALLED,
                ranks=(c.event.world_rank for c in waiting),
                message=f"{call_words(event)}, {meeting}: all members are inside with equal arguments, and nothing has "
                f"moved for {stood_ns / 1e9:.1f} s.",
                shown=waiting,
                certainty=Certainty.IS if scene.trace.complete else Certainty.LIKELY,
                weight=Weight.ALONE,
                fix="look at the stacks and at the links: workbench diagnose --pid, workbench doctor, nvidia-smi",
            )
            break


def _pairs(scene: Scene) -> Iterator[Claim]:
    """Sends and recvs that wait though their peer made as many of the counterpart: the tags may differ."""
    for story in scene.ranks.values():
        call = next((c for c in story.calls if c.event.op in COUNTERPART and scene.waits(c)), None)
        peer = None if call is None else scene.ranks.get(_peer(call))
        if call is None or peer is None or scene.end_ns - call.event.time_ns < max(_LEAST_NS, scene.patience_ns):
            continue
        if made_between(peer.calls, call) < made_between(story.calls, call):  # see absent
            continue
        event, counterpart = call.event, COUNTERPART[call.event.op]
        yield Claim.about(
            [call],
            code="stalled.peer",
            kind=Kind.STALLED,
            ranks=(event.world_rank, peer.world_rank),
            message=f"world rank {event.world_rank} waits in {call_words(event)} for world rank {peer.world_rank}, "
            f"which made a {counterpart} for each such call; none of them fits this one.",
            shown=[call, *(c for c in peer.calls if _answers(c, call))][:8],
            certainty=Certainty.LIKELY,
            weight=Weight.ALONE,
            fix="compare tag= and the sizes on both sides, and the order in which each side makes its calls",
        )
        return


def _among_strangers(scene: Scene) -> Iterator[Claim]:
    """Calls that wait on groups made by hand whose other members are not known."""
    waiting: dict[int, RankCall] = {}
    for rank, story in scene.ranks.items():
        call = next((c for c in story.calls if STRANGERS in marks(c.event) and scene.waits(c)), None)
        if call is not None and scene.end_ns - call.event.time_ns >= max(_LEAST_NS, scene.patience_ns):
            waiting[rank] = call
    if waiting:
        first = min(waiting.values(), key=lambda c: c.event.time_ns).event
        yield Claim.about(
            waiting.values(),
            code="stalled.strangers",
            kind=Kind.STALLED,
            ranks=waiting,
            message=f"{ranks_words(waiting)} wait{'s' * (len(waiting) == 1)} in {call_words(first)}, {STRANGERS}: "
            f"who is late is not known.",
            certainty=Certainty.LIKELY,
            weight=Weight.ALONE,
            fix="look at what the other members do: other jobs of this report, or workbench diagnose --pid",
        )


def _leaving(scene: Scene) -> Iterator[Claim]:
    """Ranks that wait in destroy_process_group after they captured a collective. Without a capture nothing is known."""
    held: list[tuple[RankCall, RankCall]] = []
    for story in scene.ranks.values():
        last = story.calls[-1] if story.calls else None
        if last is None or last.event.op != "destroy_process_group" or not scene.waits(last):
            continue
        captured = next((c for c in reversed(story.calls) if c.event.capture and "nccl" in (c.event.path or "")), None)
        if captured is not None and scene.end_ns - last.event.time_ns >= max(_LEAST_NS, scene.patience_ns):
            held.append((last, captured))
    if not held:
        return
    last, captured = held[0]
    yield Claim.about(
        [waiting for waiting, _ in held],
        code="stalled.destroy",
        kind=Kind.STALLED,
        ranks=(waiting.event.world_rank for waiting, _ in held),
        message=f"{call_words(last.event)} does not end: NCCL waits for every CUDA graph that holds a call on the "
        f"communicator, and {call_words(captured.event)} was captured.",
        shown=[call for pair in held for call in pair][:8],
        certainty=Certainty.LIKELY,
        weight=Weight.ALONE,
        fix="let the graphs go before their groups: graph.reset(), or del what holds them, then destroy_process_group",
    )


def _peer(call: RankCall) -> int:
    return -1 if call.event.peer_world_rank is None else call.event.peer_world_rank


def _answers(answer: RankCall, call: RankCall) -> bool:
    return answer.event.op == COUNTERPART[call.event.op] and _peer(answer) == call.event.world_rank
