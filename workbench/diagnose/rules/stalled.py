"""A call that all members entered and in which nothing moves; a receive for which its peer has sent.

Example: all four members are inside all_reduce of tp[0,1,2,3] for 30 s, with equal arguments.
Claim: `stalled`, all members: no rank stands out, so the cause lies below the calls (a link, a device, a stuck thread).
"""

from __future__ import annotations

from collections.abc import Iterator

from workbench.diagnose.claim import Claim, Weight
from workbench.diagnose.finding import Certainty, Finding, Kind
from workbench.diagnose.scene import Scene
from workbench.diagnose.words import call_words, evidence_of

_LEAST_NS = 1_000_000_000  # a call of a second is a call


def rule(scene: Scene) -> Iterator[Claim]:
    for meetings in scene.meetings.values():
        for meeting in meetings:
            waiting = [c for c in meeting.came.values() if scene.waits(c)]
            stood_ns = scene.end_ns - meeting.last_arrival_ns
            if meeting.absent or not waiting or stood_ns < max(_LEAST_NS, scene.patience_ns):
                continue
            event = meeting.first.event
            finding = Finding(
                code="stalled.call",
                kind=Kind.STALLED,
                ranks=tuple(sorted(c.event.world_rank for c in waiting)),
                group=meeting.group,
                message=f"{call_words(event)}, {meeting}: all members are inside with equal arguments, and nothing has "
                f"moved for {stood_ns / 1e9:.1f} s.",
                evidence=evidence_of(waiting),
                certainty=Certainty.IS if scene.trace.complete else Certainty.LIKELY,
                fix="look at the stacks and at the links: workbench diagnose --pid, workbench doctor, nvidia-smi",
            )
            yield Claim(finding, meeting.last_arrival_ns, Weight.ALONE, call_words(event))
            break
