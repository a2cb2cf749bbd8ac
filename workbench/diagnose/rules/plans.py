"""Ranks that do not make the same groups in the same order.

Example: world ranks 0 and 1 call new_group([0, 1]) and then new_group([0, 1, 2]); 2 calls the second alone. torch names
groups by a count of the process, so from there on the ranks wait under different names, or meet in each other's groups.
Claim: `group-plan-mismatch`, the ranks outside the largest party at the first new_group that differs; all of them
without one. A rank that stands in no call may still come: that it is waited for is a likely `rendezvous-partial`.
Groups made with use_local_synchronization are no part of the common order: there the names that members compute must
be equal.
Evidence: the calls that make the group, on every rank that made one then.
Try: make all groups on every rank in one order, and pick the own one afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from workbench.diagnose.claim import Claim, Weight
from workbench.diagnose.finding import Certainty, Kind
from workbench.diagnose.parties import at_fault, parties_words
from workbench.diagnose.scene import RankStory, Scene, is_local
from workbench.diagnose.words import call_words, group_words, raised, ranks_words
from workbench.trace import RankCall

_FIX = (
    "make all groups on every rank, in one order: [dist.new_group(ranks) for ranks in lists], and pick the own one "
    "afterwards; or make them with use_local_synchronization=True, in one order on the members"
)

_SIZE_FIX = (
    "give every rank the same world_size, or let torchrun give it: init_process_group() without rank and world_size"
)

_Plans = dict[int, list[RankCall]]


def rule(scene: Scene) -> Iterator[Claim]:
    yield from _sizes_differ(scene)
    by_generation: dict[int, _Plans] = defaultdict(dict)
    for rank, story in scene.ranks.items():
        if story.trace.drops.complete:
            for generation in _generations(story):
                by_generation[generation][rank] = [c for c in story.plan if _generation(c) == generation]
    for plans in by_generation.values():
        local = {_members(c) for plan in plans.values() for c in plan if is_local(c)}
        common = {rank: [c for c in plan if _members(c) not in local] for rank, plan in plans.items()}
        yield from _first_difference(scene, common)
        for members in sorted(local):
            yield from _names_differ(scene, plans, members)


def _sizes_differ(scene: Scene) -> Iterator[Claim]:
    """Ranks that make the default group with different numbers of ranks wait for some that never come."""
    for here in scene.inits.values():
        sizes = {rank: len(_members(call)) for rank, call in here.items()}
        if len(set(sizes.values())) > 1 and _is_waited_in(scene, here):
            lines = parties_words(sizes, {rank: f"({call_words(call.event)})" for rank, call in here.items()})
            text = f"the ranks make the default group with different world sizes: {lines}."
            yield _claim("plan.world-size", at_fault(sizes), here, text, fix=_SIZE_FIX)


def _first_difference(scene: Scene, plans: _Plans) -> Iterator[Claim]:
    for place in range(max(map(len, plans.values()), default=0)):
        here = {rank: plan[place] for rank, plan in plans.items() if place < len(plan)}
        said = {rank: f"new_group({list(_members(call))})" for rank, call in here.items()}
        late = tuple(sorted(set(plans) - set(here)))
        if len(set(said.values())) > 1:
            lines = parties_words(said, {rank: f"at {call.event.site}" for rank, call in here.items()})
            yield _claim(
                "plan.order",
                at_fault(said),
                here,
                f"group {place + 1} that the ranks make differs: {lines}.",
            )
            return
        if late and (gone := tuple(r for r in late if _went_another_way(scene, scene.ranks[r], here))):
            yield _left_out(here, gone)
            return
        if late and _is_waited_in(scene, here):
            yield _not_there(scene, here, late)
            return


def _left_out(here: Mapping[int, RankCall], gone: tuple[int, ...]) -> Claim:
    first = min(here.values(), key=lambda c: c.event.time_ns).event
    text = f"{call_words(first)} for {group_words(first.group)} was entered by {ranks_words(here)} and left out by "
    return _claim("plan.left-out", gone, here, f"{text}{ranks_words(gone)}.")


def _not_there(scene: Scene, here: Mapping[int, RankCall], late: tuple[int, ...]) -> Claim:
    """Ranks that have not made the group, and stand in no call: they may still come, or have trouble of their own."""
    first = min(here.values(), key=lambda c: c.event.time_ns).event
    text = f"{call_words(first)} for {group_words(first.group)} was entered by {ranks_words(here)} and not by "
    return Claim.about(
        here.values(),
        code="plan.absent",
        kind=Kind.RENDEZVOUS_PARTIAL,
        ranks=late,
        message=f"{text}{ranks_words(late)}.{raised(here.values())}",
        absent=late,
        certainty=Certainty.LIKELY,
        weight=Weight.SYMPTOM if all(scene.is_gone(r) for r in late) else Weight.CAUSE,
        fix=_FIX,
    )


def _is_waited_in(scene: Scene, here: Mapping[int, RankCall]) -> bool:
    return any(scene.waits(c) or (c.end is not None and c.end.error) for c in here.values())


def _went_another_way(scene: Scene, story: RankStory, here: Mapping[int, RankCall]) -> bool:
    """Whether a rank that made fewer groups ended well, or stands in another call while the others wait."""
    if not _is_waited_in(scene, here):
        return story.exit_status == 0 and all(c.end is not None for c in here.values())
    return story.exit_status == 0 or (story.exception is None and story.inside is not None)


def _names_differ(scene: Scene, plans: _Plans, members: tuple[int, ...]) -> Iterator[Claim]:
    """Names of locally synchronised groups are salted with the number of groups that a process has."""
    own = {r: [c for c in plans[r] if _members(c) == members] for r in members if r in plans}
    for place in range(min(map(len, own.values()), default=0)):
        here = {rank: calls[place] for rank, calls in own.items()}
        names = {rank: _label(call) for rank, call in here.items()}
        failed = any(scene.waits(c) or (c.end is not None and c.end.error) for c in here.values())
        if len(set(names.values())) > 1 and failed:
            made = {r: f"{sum(1 for c in plans[r] if c.event.ordinal < here[r].event.ordinal)} groups" for r in here}
            first = min(here.values(), key=lambda c: c.event.time_ns).event
            text = f"{call_words(first)} with use_local_synchronization: the members of {list(members)} compute "
            text += f"different names for the group, because they had made {parties_words(made)} before."
            yield _claim("plan.local-name", at_fault(names), here, text)
            return


def _claim(code: str, blamed: tuple[int, ...], here: Mapping[int, RankCall], text: str, *, fix: str = _FIX) -> Claim:
    return Claim.about(
        here.values(),
        code=code,
        kind=Kind.GROUP_PLAN_MISMATCH,
        ranks=blamed,
        group=here[blamed[0]].event.group if blamed[0] in here else None,
        message=text + raised(here.values()),
        fix=fix,
    )


def _members(call: RankCall) -> tuple[int, ...]:
    assert call.event.group is not None
    return tuple(sorted(call.event.group.world_ranks))


def _label(call: RankCall) -> str:
    assert call.event.group is not None
    return call.event.group.label


def _generation(call: RankCall) -> int:
    return call.event.group.generation if call.event.group is not None else 0


def _generations(story: RankStory) -> set[int]:
    return {c.event.group.generation for c in story.calls if c.event.group is not None}
