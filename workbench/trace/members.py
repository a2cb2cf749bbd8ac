"""Groups that a program made by hand, of a store and numbers: who their members are, found among all ranks.

torch does not count such a group among its own, so each rank knows its number in it and where the members meet, and no
world rank but its own. Where the ranks of the trace are not all members, nothing is said of what the others did.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from workbench.ranks import GroupKey
from workbench.trace.event import BY_HAND, Event, GroupInfo
from workbench.trace.records import Trace
from workbench.trace.remarks import STRANGERS

_Group = tuple[str, int, int]  # where its members meet, their number, generation


def find_members(trace: Trace) -> Trace:
    """The trace with the world ranks of the members of such groups; calls on others say so. Once a trace."""
    found: dict[_Group, list[tuple[int, int]]] = defaultdict(list)  # each member's number in it, and world rank
    for rank in trace.ranks:
        for info in rank.groups:
            if info.key.kind == BY_HAND:
                found[_group(info)].append((info.ordinal, rank.world_rank))
    if not found:
        return trace
    known = {}
    for (place, size, generation), members in found.items():
        numbers, world_ranks = zip(*sorted(members), strict=True)
        if place and numbers == tuple(range(size)):
            known[place, size, generation] = GroupInfo(GroupKey(BY_HAND, world_ranks), place, 0, generation)
    events = tuple(_named(e, known) if e.group is not None and e.group.key.kind == BY_HAND else e for e in trace.events)
    ranks = tuple(replace(rank, groups=_known_groups(rank.groups, known)) for rank in trace.ranks)
    return replace(trace, ranks=ranks, events=events)


def _known_groups(groups: Iterable[GroupInfo], known: Mapping[_Group, GroupInfo]) -> tuple[GroupInfo, ...]:
    named = (g if g.key.kind != BY_HAND else known.get(_group(g)) for g in groups)
    return tuple(g for g in named if g is not None)


def _named(event: Event, known: Mapping[_Group, GroupInfo]) -> Event:
    assert event.group is not None
    group = known.get(_group(event.group))
    if group is None:
        note = "; ".join(filter(None, (STRANGERS, event.note)))
        return replace(event, peer_world_rank=None, root_world_rank=None, root_group_rank=None, note=note)
    return replace(
        event,
        group=group,
        peer_world_rank=_member(group, event.peer_world_rank),
        root_world_rank=_member(group, event.root_group_rank),
    )


def _member(group: GroupInfo, number: int | None) -> int | None:
    return number if number is None or not 0 <= number < len(group.world_ranks) else group.world_ranks[number]


def _group(info: GroupInfo) -> _Group:
    return info.label, len(info.world_ranks), info.generation
