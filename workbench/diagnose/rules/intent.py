"""A call on another group than meant: by a rank that is no member, or without group= where groups were declared.

Example: world rank 2 calls all_reduce on group [0,1]: torch does nothing and its tensor stays unreduced. A program
declares tp [[0,1],[2,3]], and all four ranks broadcast an object without group=: every group gets world rank 0's.
Claim: `non-member-call`, the ranks that are no members. `wrong-group`, the ranks that left group= out, where no
declared group has all ranks; a barrier over all ranks is no finding. Many maps hold a kind "world" whether it is used
or not: where it alone has all ranks, an exchange of objects without group= is likely meant for a smaller group.
Evidence: the calls.
Try: call it on members only; pass group=, and a root as a place in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from workbench.diagnose.claim import Claim, Weight
from workbench.diagnose.finding import Certainty, Kind
from workbench.diagnose.scene import CREATION, EXCHANGES, Scene, marks
from workbench.diagnose.words import call_words, group_words, raised, ranks_words
from workbench.trace import CallSite, RankCall

_HARMLESS = CREATION | {"barrier", "monitored_barrier"}


def rule(scene: Scene) -> Iterator[Claim]:
    strangers: dict[CallSite | None, list[RankCall]] = defaultdict(list)
    forgotten: dict[CallSite | None, list[RankCall]] = defaultdict(list)
    for story in scene.ranks.values():
        for call in story.calls:
            said = marks(call.event)
            if "non-member" in said:
                strangers[call.event.site].append(call)
            elif "default group" in said and _is_unmeant(scene, call):
                forgotten[call.event.site].append(call)
    for calls in strangers.values():
        yield _stranger(scene, calls)
    for calls in forgotten.values():
        yield _forgotten(scene, calls)


def _is_unmeant(scene: Scene, call: RankCall) -> bool:
    group = call.event.group
    if group is None or call.event.op in _HARMLESS or len(scene.declared) < 2:
        return False
    kinds = scene.declared.get(frozenset(group.world_ranks), set())
    return not kinds or (kinds == {"world"} and call.event.op in EXCHANGES)


def _stranger(scene: Scene, calls: list[RankCall]) -> Claim:
    event = calls[0].event
    ranks = tuple(sorted({c.event.world_rank for c in calls}))
    of = f" of {group_words(event.group)}" if event.group is not None else " of the group"
    line = event.site
    failed = any(
        c.event.site == line and c.end is not None and c.end.error for s in scene.ranks.values() for c in s.calls
    )
    returned = any(c.end is not None and not c.end.error for c in calls)
    return Claim.about(
        calls,
        code="group.non-member",
        kind=Kind.NON_MEMBER_CALL,
        ranks=ranks,
        message=f"{call_words(event)} was called by {ranks_words(ranks)}, which "
        f"{'is no member' if len(ranks) == 1 else 'are no members'}{of}."
        f"{raised(calls)}{' Torch returned at once and left the tensor as it was.' if returned else ''}",
        weight=Weight.SYMPTOM if failed else Weight.CAUSE,
        fix="call it on members only, or make a group that has these ranks",
    )


def _forgotten(scene: Scene, calls: list[RankCall]) -> Claim:
    event = calls[0].event
    ranks = tuple(sorted({c.event.world_rank for c in calls}))
    own = [str(sorted(g)) for g in sorted(scene.declared, key=sorted) if g & set(ranks) and g != set(ranks)]
    more = f" and {len(own) - 6} more" if len(own) > 6 else ""
    sure = event.group is not None and frozenset(event.group.world_ranks) not in scene.declared
    return Claim.about(
        calls,
        code="group.default",
        kind=Kind.WRONG_GROUP,
        ranks=ranks,
        message=f"{call_words(event)} was called without group= by {ranks_words(ranks)}, so over "
        f"{group_words(event.group)}; the program declared {', '.join(own[:6])}{more}.",
        certainty=Certainty.IS if sure else Certainty.LIKELY,
        fix="pass group=, and a root as group_src= or group_dst=; or group=dist.group.WORLD if all ranks are meant",
    )
