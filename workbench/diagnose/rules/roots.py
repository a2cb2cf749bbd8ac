"""A root that is no member of the group, or that was meant as a place in the group.

Example: both members of tp[2,3] call broadcast(src=0): 0 is the leader's place in the group; its world rank is 2.
Claim: `wrong-root`, the members that passed it. Where another group takes the same root from the same line and has a
member of that number, it is likely wrong there too, though nothing was raised. What torch refuses changes nothing:
where every rank that came to the line was refused and went on, the program knows of it, and it is told only beside
something else.
Evidence: the calls, with what they raised.
Try: group_src= or group_dst=, which take a place in the group.
"""

from __future__ import annotations

from collections.abc import Iterator

from workbench.diagnose.claim import Claim, Weight
from workbench.diagnose.finding import Certainty, Kind
from workbench.diagnose.scene import GroupName, Meeting, Scene
from workbench.diagnose.words import call_words, group_words, raised
from workbench.trace import BY_HAND, CallSite, RankCall

_FIX = "pass the place in the group as group_src= or group_dst=, or dist.get_global_rank(group, place) as src= or dst="

_Where = tuple[CallSite | None, str, int | None]  # the line, the operation and the root that were passed


def rule(scene: Scene) -> Iterator[Claim]:
    outside = [
        (name, meeting, wrong)
        for name, meetings in scene.meetings.items()
        for meeting in meetings
        if (wrong := {r: c for r, c in meeting.came.items() if _is_outside(c)})
    ]
    if not outside:
        return
    survived = _survived(scene)
    told: set[tuple[GroupName, _Where]] = set()
    for name, meeting, wrong in outside:
        where = _where(next(iter(wrong.values())))
        if (name, where) not in told:
            yield _outside(meeting, wrong, Weight.BESIDE if where[0] in survived else Weight.CAUSE)
        told.add((name, where))
    suspected = {_where(c) for _, _, wrong in outside for c in wrong.values()}
    for name, meetings in scene.meetings.items():
        for meeting in meetings:
            first = meeting.first
            root = first.event.root_world_rank
            if _where(first) in suspected and not _is_outside(first) and root is not None:
                if root < len(name.world_ranks) and name.world_ranks[root] != root:
                    yield _place(meeting, root)
                break


def _survived(scene: Scene) -> set[CallSite | None]:
    """Lines from which every call, by all members, was refused for its root, and after which every rank went on."""
    refused: set[CallSite | None] = set()
    others: set[CallSite | None] = set()
    for meetings in scene.meetings.values():
        for meeting in meetings:
            for rank, call in meeting.came.items():
                failed = _is_outside(call) and call.end is not None and call.end.error != ""
                over = failed and not meeting.absent and scene.ranks[rank].went_on_after(call)
                (refused if over else others).add(call.event.site)
    return refused - others


def _is_outside(call: RankCall) -> bool:
    event = call.event
    if event.root_world_rank is None or event.group is None or event.group.key.kind == BY_HAND:
        return False
    return event.root_world_rank not in event.group.world_ranks


def _where(call: RankCall) -> _Where:
    return call.event.site, call.event.op, call.event.root_world_rank


def _outside(meeting: Meeting, wrong: dict[int, RankCall], weight: Weight) -> Claim:
    event = next(iter(wrong.values())).event
    root, members = event.root_world_rank, meeting.name.world_ranks
    meant = ""
    if root is not None and root < len(members):
        meant = f"; the member at place {root} is world rank {members[root]}"
    return Claim.about(
        wrong.values(),
        code="root.outside",
        kind=Kind.WRONG_ROOT,
        ranks=wrong,
        message=f"{call_words(event)} names world rank {root} as root of {group_words(meeting.group)}, which has no "
        f"such member{meant}.{raised(wrong.values())}",
        weight=weight,
        fix=_FIX,
    )


def _place(meeting: Meeting, root: int) -> Claim:
    event = meeting.first.event
    return Claim.about(
        meeting.came.values(),
        code="root.place",
        kind=Kind.WRONG_ROOT,
        ranks=meeting.came,
        message=f"{call_words(event)} names world rank {root} as root of {group_words(meeting.group)}; from the same "
        f"line the same root goes to a group without such a member, so place {root} may be meant, which is world rank "
        f"{meeting.name.world_ranks[root]} here.{raised(meeting.came.values())}",
        certainty=Certainty.LIKELY,
        weight=Weight.REMARK,
        fix=_FIX,
    )
