"""How ranks end: an exception, a signal, a status.

Example: world rank 1 raises ValueError before an all-reduce, and the others wait: `peer-exception`, rank 1. World rank
2 is killed by signal 9: `peer-dead`. A store cannot listen on its port: `environment`.
Claim: an exception that no recorded call raised is a cause of its own, one that ended a thread too. One that a recorded
call raised belongs to that call, and is told only where nothing else is found; what its text says decides the kind. A
status after the default group was destroyed is the program's own.
Evidence: the exception or the exit as the rank noted it.
Try: what the text is known to mean; else repair what the rank ran into.
"""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from workbench.diagnose.claim import DEATH, Claim, Weight
from workbench.diagnose.finding import Certainty, Finding, Kind
from workbench.diagnose.log_lines import explain_log_line
from workbench.diagnose.scene import POLITE, RankStory, Scene, marks
from workbench.diagnose.words import call_words, error_words, ranks_words, without_address
from workbench.trace import CallSite, Event

_CAUSES = frozenset(
    {
        *(Kind.ENVIRONMENT, Kind.HANDLE_FAILURE, Kind.WORKSPACE_OVERFLOW, Kind.CAPTURE_COLLECTIVE),
        *(Kind.CAPTURE_COUNT_MISMATCH, Kind.DOUBLE_REDUCE, Kind.MISSING_REDUCE),
    }
)
"""Kinds that a text alone tells. Others, such as a timeout, are told by calls or not at all."""


def rule(scene: Scene) -> Iterator[Claim]:
    raised: dict[tuple[str, CallSite | None, bool], list[Event]] = defaultdict(list)
    for story in scene.ranks.values():
        ending = story.exception
        for event in (*story.thread_exceptions, *([] if ending is None else [ending])):
            raised[without_address(event.error), event.site, _belongs_to_a_call(story, event)].append(event)
        if ending is not None:
            continue
        if story.exit is not None and _died(scene, story):
            yield _death(story, story.exit.time_ns, (str(story.exit),))
        elif story.exit is None and story.world_rank in scene.dead:
            yield _death(story, story.last_ns, ())
    did_raise = {e.world_rank for events in raised.values() for e in events}
    for (_, _, by_call), events in raised.items():
        yield _exception(events, by_call, others_wait=not did_raise.issuperset(scene.ranks))


def _died(scene: Scene, story: RankStory) -> bool:
    """Whether the rank ended badly by itself. What it exits with after it destroyed its groups is its own affair."""
    status = story.exit_status or 0
    left = story.calls[-1] if story.calls else None
    is_out = left is not None and "default group" in marks(left.event) and left.event.op == "destroy_process_group"
    return status != 0 and not scene.was_ended(story.world_rank) and not (is_out and (status > 0 or status in POLITE))


def _belongs_to_a_call(story: RankStory, event: Event) -> bool:
    """Whether a recorded call raised the exception that ended the rank."""
    return any(c.end is not None and c.end.error == event.error for c in (*story.calls[-4:], *story.inner[-4:]))


def _exception(events: list[Event], by_call: bool, *, others_wait: bool) -> Claim:
    first = events[0]
    ranks = tuple(sorted({e.world_rank for e in events}))
    known = explain_log_line(first.error)
    repair = "repair what the ranks ran into; none was left to wait"
    if others_wait:
        repair = "repair what this rank ran into; the other ranks waited for it"
    told = known is not None and known.kind in _CAUSES
    assert known is not None or not told
    kind = known.kind if known is not None and told else Kind.PEER_EXCEPTION
    where = f" in {first.site}" if first.site is not None else ""
    meaning = f" {known.says}" if known is not None and told else ""
    finding = Finding(
        code=f"ending.{known.code}" if known is not None and told else "ending.exception",
        kind=kind,
        ranks=ranks,
        group=first.group,
        message=f"{ranks_words(ranks)} raised {error_words(first.error)}{where}.{meaning}",
        evidence=tuple(str(replace(e, error=e.error.partition(":")[0])) for e in events[:8]),
        certainty=Certainty.IS if told or not by_call else Certainty.LIKELY,
        fix=known.fix if known is not None else repair,
    )
    weight = Weight.ALONE if by_call and not told else Weight.CAUSE
    return Claim(finding, first.time_ns, weight, places={e.world_rank: e.ordinal for e in events})


def _death(story: RankStory, time_ns: int, evidence: tuple[str, ...]) -> Claim:
    status = story.exit_status
    by_parent = story.exit is not None and story.exit.note.endswith("by its parent")
    how = "is gone, and nothing tells how it ended"
    if status is not None:
        by = re.match(r"status=\d+, ((?:sys\.|os\._)exit.*)", story.exit.note, re.DOTALL) if story.exit else None
        how = f"exited with status {status} {f'by {error_words(by[1])}' if by else 'and no exception'}"
        how = how if status > 0 else f"was ended by {_signal(-status)}{', which its parent sent' if by_parent else ''}"
    inside = f" inside {call_words(story.inside.event)}" if story.inside is not None else ""
    last = f"; its last call was {call_words(story.calls[-1].event)}" if story.calls and not inside else ""
    finding = Finding(
        code="ending.death",
        kind=Kind.PEER_DEAD,
        ranks=(story.world_rank,),
        message=f"world rank {story.world_rank} {how}{inside}{last}.",
        evidence=evidence,
        certainty=Certainty.IS,
        fix="find why its parent ended it while others needed it"
        if by_parent
        else "read the end of this rank's own output; for signal 9, dmesg tells whether memory ran out",
    )
    last_call = story.calls[-1] if story.calls else None
    by_call = status is not None and status > 0 and last_call is not None and last_call.end and last_call.end.error
    return Claim(finding, time_ns, Weight.ALONE if by_call else Weight.CAUSE, places={story.world_rank: DEATH})


def _signal(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} ({number})"
    except ValueError:
        return f"signal {number}"
