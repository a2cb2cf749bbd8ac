"""A rank whose process is stopped while others wait: it does nothing, and ends no call that it is in.

Example: world rank 1 got SIGSTOP inside all_reduce of tp[0,1], and world rank 0 waits there for 30 s.
Claim: `stalled`, the stopped rank, whether it stands in a call or never came to the one the others wait in.
Evidence: the call it is in, or made last.
Try: find what stopped it; SIGCONT lets a process go on that is still there, which records cannot tell.
"""

from __future__ import annotations

from collections.abc import Iterator

from workbench.diagnose.claim import DEATH, Claim
from workbench.diagnose.finding import Certainty, Finding, Kind
from workbench.diagnose.scene import RankStory, Scene
from workbench.diagnose.words import call_words, evidence_of, ranks_words


def rule(scene: Scene) -> Iterator[Claim]:
    if not scene.stopped:
        return
    waiting = {s.world_rank for s in scene.ranks.values() for c in s.calls if scene.waits(c)} - scene.stopped
    if waiting:
        yield from (_stopped(scene.ranks[r], waiting) for r in sorted(scene.stopped) if r in scene.ranks)


def _stopped(story: RankStory, waiting: set[int]) -> Claim:
    call = story.inside or (story.calls[-1] if story.calls else None)
    where = "" if call is None else f"{'inside' if story.inside else 'after'} {call_words(call.event)}"
    finding = Finding(
        code="stopped.process",
        kind=Kind.STALLED,
        ranks=(story.world_rank,),
        group=None if call is None else call.event.group,
        message=f"the process of world rank {story.world_rank} (pid {story.trace.header.pid}) is stopped {where}, by "
        f"SIGSTOP, SIGTSTP or a debugger, and {ranks_words(waiting)} {'waits' if len(waiting) == 1 else 'wait'}.",
        evidence=() if call is None else evidence_of([call]),
        certainty=Certainty.IS,
        fix="find what stopped it, such as Ctrl-Z or a debugger; while the process is there, SIGCONT lets it go on",
    )
    return Claim(finding, story.last_ns, places={story.world_rank: DEATH})
