"""Pairs a rank's begins with their ends. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from workbench.trace.event import Event, GroupInfo, Phase


@dataclass(frozen=True, slots=True)
class RankCall:
    """One call of one rank: its begin, its end, or both. A call without end was still open when the trace was read."""

    begin: Event | None
    end: Event | None

    @property
    def event(self) -> Event:
        """Whichever there is, to read what both say alike."""
        event = self.begin or self.end
        assert event is not None
        return event


def pair_calls(events: Iterable[Event]) -> tuple[RankCall, ...]:
    """The calls of one or several ranks, in the order of their first event. An end without begin is a call too.

    A begin meets the next end with the same rank, group, op, peer and sequence. Calls of no group, which have no
    sequence of their own, nest: an end meets the latest open begin of the same op.
    """
    calls: list[list[Event | None]] = []
    open_calls: dict[tuple[object, ...], list[int]] = {}
    groups: dict[GroupInfo | None, int] = {}
    numbers: dict[int, int] = {}  # of groups by id: `calls` keeps them, and hashing one takes as long as all the rest
    for event in events:
        if event.phase is Phase.INSTANT:
            continue
        number = numbers.get(id(event.group))
        if number is None:
            number = numbers[id(event.group)] = groups.setdefault(event.group, len(groups))
        name = (event.world_rank, number, event.op, event.peer_world_rank, event.sequence)
        if event.phase is Phase.BEGIN:
            open_calls.setdefault(name, []).append(len(calls))
            calls.append([event, None])
        else:
            waiting = open_calls.pop(name, None)
            if waiting:
                calls[waiting.pop()][1] = event
                if waiting:
                    open_calls[name] = waiting
            else:
                calls.append([None, event])
    return tuple(RankCall(begin, end) for begin, end in calls)


def group_name(group: GroupInfo | None) -> str:
    """A short name for a lane in a picture: kind, at most eight ranks, generation."""
    if group is None:
        return "no group"
    ranks = group.world_ranks
    shown = ",".join(map(str, ranks if len(ranks) <= 8 else ranks[:6]))
    tail = "" if len(ranks) <= 8 else f",... {ranks[-1]} ({len(ranks)} ranks)"
    name = f"{group.key.kind}[{shown}{tail}]"
    return name if group.generation == 0 else f"{name} generation {group.generation}"
