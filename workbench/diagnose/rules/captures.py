"""Captures: what must not happen inside one, and captures that differ between ranks.

Example: world rank 1 makes a workspace between the begin and the end of its capture. In the second capture world rank 0
records three calls on tp[0,1] and 1 records two; or one records a call that the other runs.
Claim: `capture-collective`, the ranks that made the call inside. `capture-count-mismatch`, the ranks outside the
largest party.
Evidence: the calls inside, or the captures with what they raised.
Try: make workspaces before the capture; agree on what is captured before entering it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from workbench.diagnose.claim import Claim
from workbench.diagnose.finding import Kind
from workbench.diagnose.parties import at_fault, parties_words
from workbench.diagnose.scene import CREATION, EXCHANGES, Scene, is_meeting
from workbench.diagnose.words import call_words, group_words, raised, ranks_words
from workbench.trace import GroupInfo, RankCall

FORBIDDEN = CREATION | EXCHANGES | {"store_wait", "barrier", "monitored_barrier"}
"""What waits on the host or makes memory: it belongs before the capture."""


def rule(scene: Scene) -> Iterator[Claim]:
    captures = {rank: [c for c in s.calls if c.event.op == "capture"] for rank, s in scene.ranks.items()}
    yield from _forbidden(scene, captures)
    yield from _half_recorded(scene)
    yield from _different_counts(scene, captures)


def _within(call: RankCall, capture: RankCall) -> bool:
    begin, start, end = call.begin, capture.begin, capture.end
    if begin is None or start is None:
        return False
    return start.ordinal < begin.ordinal and (end is None or begin.ordinal < end.ordinal)


def _forbidden(scene: Scene, captures: dict[int, list[RankCall]]) -> Iterator[Claim]:
    found: dict[str, list[RankCall]] = defaultdict(list)
    for rank, own in captures.items():
        for capture in own:
            for call in scene.ranks[rank].calls:
                if call.event.op in FORBIDDEN and _within(call, capture):
                    found[call_words(call.event)].append(call)
                    break
    for words, calls in found.items():
        ranks = tuple(sorted({c.event.world_rank for c in calls}))
        yield Claim.about(
            calls,
            code="capture.forbidden",
            kind=Kind.CAPTURE_COLLECTIVE,
            ranks=ranks,
            message=f"{words} was called by {ranks_words(ranks)} inside a capture; it waits for other ranks on the "
            f"host, or makes memory.{raised(calls)}",
            fix="call it before the capture, on every rank",
        )


def _half_recorded(scene: Scene) -> Iterator[Claim]:
    """A call that some members record into a graph while others run it: those that run it wait for a replay."""
    for meetings in scene.meetings.values():
        for meeting in meetings:
            said = {r: "recorded" if c.event.capture else "run" for r, c in meeting.came.items()}
            if len(set(said.values())) < 2:
                continue
            yield Claim.about(
                meeting.came.values(),
                code="capture.half",
                kind=Kind.CAPTURE_COUNT_MISMATCH,
                ranks=at_fault(said),
                message=f"{call_words(meeting.first.event)}, {meeting}: {parties_words(said)}.",
                fix="agree on every rank whether this step is captured, replayed or run, before entering it",
            )
            break


def _different_counts(scene: Scene, captures: dict[int, list[RankCall]]) -> Iterator[Claim]:
    """Of each group: the first of its captures in which members recorded different numbers of calls."""
    holding: dict[tuple[int, ...], dict[int, list[tuple[RankCall, int]]]] = defaultdict(lambda: defaultdict(list))
    infos: dict[tuple[int, ...], GroupInfo] = {}
    for rank, own in captures.items():
        for capture in own if scene.ranks[rank].trace.drops.complete else ():
            for info, number in _recorded(scene, rank, capture).items() if capture.end is not None else ():
                infos.setdefault(info.world_ranks, info)
                holding[info.world_ranks][rank].append((capture, number))
    for members, by_rank in holding.items():
        for place in range(min(map(len, by_rank.values()))):
            counts = {rank: found[place][1] for rank, found in by_rank.items()}
            if len(set(counts.values())) > 1:
                yield _counted(infos[members], counts, {rank: found[place][0] for rank, found in by_rank.items()})
                break


def _recorded(scene: Scene, rank: int, capture: RankCall) -> Counter[GroupInfo]:
    """How many calls on each group the rank recorded in this capture."""
    calls = [c for c in scene.ranks[rank].calls if c.event.capture and is_meeting(c.event) and _within(c, capture)]
    return Counter(c.event.group for c in calls if c.event.group is not None)


def _counted(info: GroupInfo, counts: dict[int, int], whole: dict[int, RankCall]) -> Claim:
    lines = parties_words({rank: f"{number} calls" for rank, number in counts.items()})
    first = min((whole[r] for r in counts), key=lambda c: c.event.time_ns).event
    return Claim.about(
        (whole[r] for r in counts),
        code="capture.count",
        kind=Kind.CAPTURE_COUNT_MISMATCH,
        ranks=at_fault(counts),
        group=info,
        message=f"the capture in {first.site} holds different numbers of calls on {group_words(info)}: "
        f"{lines}.{raised(whole[r] for r in counts)}",
        fix="capture the same calls on every member; compare the counts before any exchange or replay",
    )
