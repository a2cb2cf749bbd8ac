"""A call of a group that some members never enter, while the others wait for them, failed, or went on without.

Example: world ranks 0 and 1 wait in all_gather_object #1 of world[0,1,2,3]; 2 and 3 have ended and never came.
Claim: `rendezvous-partial` where it is the first call on the group, or an exchange between hosts; `missing-call` later.
The absent ranks are at fault. Only the first such call of a group is told.
"""

from __future__ import annotations

from collections.abc import Iterator

from workbench.diagnose.claim import Claim
from workbench.diagnose.finding import Certainty, Finding, Kind
from workbench.diagnose.scene import OBJECTS, Meeting, Scene
from workbench.diagnose.words import call_words, evidence_of, ranks_words


def rule(scene: Scene) -> Iterator[Claim]:
    for meetings in scene.meetings.values():
        for meeting in meetings:
            if meeting.absent and _is_over(scene, meeting):
                yield _claim(scene, meetings, meeting)
                break


def _is_over(scene: Scene, meeting: Meeting) -> bool:
    """Whether somebody waits in vain: who is absent is gone, or has been waited for longer than patience allows."""
    waiting = scene.waits_in(meeting)
    if waiting or meeting.failed:
        return True
    return all(scene.is_gone(r) for r in meeting.absent)


def _claim(scene: Scene, meetings: list[Meeting], meeting: Meeting) -> Claim:
    event = meeting.first.event
    earlier = {r for m in meetings if m.sequence < meeting.sequence for r in m.came}
    first = not earlier & set(meeting.absent)
    rendezvous = first or event.op in OBJECTS
    blamed = meeting.missing or meeting.unknown
    waiting = scene.waits_in(meeting)
    came = sorted(meeting.came)
    errors = {c.end.error: None for c in meeting.came.values() if c.end is not None and c.end.error}
    told = [f"{ranks_words(came)} came"]
    if waiting:
        waited_s = (scene.end_ns - event.time_ns) / 1e9
        told.append(f"{ranks_words(waiting)} still wait{'s' * (len(waiting) == 1)} after {waited_s:.1f} s")
    told.append(f"{ranks_words(blamed)} never did" if meeting.missing else f"nothing is known of {ranks_words(blamed)}")
    where = "; ".join(_whereabouts(scene, r) for r in blamed[:4])
    raised = f" It raised {'; '.join(errors)}." if errors else ""
    call = f"{call_words(event)}, call #{meeting.sequence} of {meeting.group}"
    sure = bool(meeting.missing) and all(_cannot_come(scene, r) for r in blamed)
    finding = Finding(
        code="absent.rendezvous" if rendezvous else "absent.call",
        kind=Kind.RENDEZVOUS_PARTIAL if rendezvous else Kind.MISSING_CALL,
        ranks=tuple(sorted(blamed)),
        group=meeting.group,
        message=f"{call}: {', '.join(told)}. {where}.{raised}",
        evidence=evidence_of(meeting.came.values()),
        certainty=Certainty.IS if sure else Certainty.LIKELY,
        fix="make every member of the group reach this call, or name the group of those that do with group=",
    )
    return Claim(finding, max([event.time_ns, *(scene.ranks[r].last_ns for r in blamed if r in scene.ranks)]))


def _cannot_come(scene: Scene, world_rank: int) -> bool:
    story = scene.ranks.get(world_rank)
    return scene.is_gone(world_rank) or (story is not None and story.inside is not None)


def _whereabouts(scene: Scene, world_rank: int) -> str:
    """What the rank does instead."""
    story = scene.ranks.get(world_rank)
    if story is None:
        return f"World rank {world_rank} left no records"
    if story.exception is not None:
        return f"World rank {world_rank} ended with {story.exception.error}"
    if story.inside is not None:
        return f"World rank {world_rank} is inside {call_words(story.inside.event)}"
    last = f"; its last call was {call_words(story.calls[-1].event)}" if story.calls else "; it made no call"
    return f"World rank {world_rank} {'has ended' if scene.is_gone(world_rank) else 'is in no recorded call'}{last}"
