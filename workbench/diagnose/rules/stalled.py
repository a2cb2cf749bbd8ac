"""A call that all members entered and in which nothing moves; a receive whose peer has sent, yet nothing that fits.

Example: all four members are inside all_reduce of tp[0,1,2,3] for 30 s, with equal arguments.
Claim: `stalled`, all members: no rank stands out, so the cause lies below the calls (a link, a device, a stuck thread).
Evidence: the calls that wait, and the peer's sends.
Try: the stacks and the links; for a receive, the tags and sizes of both sides.
"""

from __future__ import annotations

from collections.abc import Iterator

from workbench.diagnose.claim import Claim, Weight
from workbench.diagnose.finding import Certainty, Kind
from workbench.diagnose.rules.absent import COUNTERPART, made_between
from workbench.diagnose.scene import Scene
from workbench.diagnose.words import call_words
from workbench.trace import RankCall

_LEAST_NS = 1_000_000_000  # a call of a second is a call


def rule(scene: Scene) -> Iterator[Claim]:
    yield from _collectives(scene)
    yield from _pairs(scene)


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


def _peer(call: RankCall) -> int:
    return -1 if call.event.peer_world_rank is None else call.event.peer_world_rank


def _answers(answer: RankCall, call: RankCall) -> bool:
    return answer.event.op == COUNTERPART[call.event.op] and _peer(answer) == call.event.world_rank
