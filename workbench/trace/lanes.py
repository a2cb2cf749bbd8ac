"""Who waited for whom: each collective call of a group, with every member's arrival and departure. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from workbench.ranks import GroupKey
from workbench.trace.calls import RankCall, pair_calls
from workbench.trace.event import CallSite, Event, GroupInfo, Phase
from workbench.trace.records import Trace


class Presence(Enum):
    """What is known of one member and one call.

    LEFT      it came and left
    FAILED    it came, and its call raised
    WAITING   it came and was still inside when the trace was read
    MISSING   it never came: its own trace is whole and does not hold the call
    UNKNOWN   its trace is missing or has lost events, so it may have come
    """

    LEFT = "left"
    FAILED = "failed"
    WAITING = "waiting"
    MISSING = "missing"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One member in one call. Units: ns on the trace's clock.

    `waited_ns` is the time from its arrival to the last arrival, or to the end of the trace if a member is missing:
    what it lost to the others, whatever the call itself costs.
    """

    world_rank: int
    presence: Presence
    arrive_ns: int | None = None
    leave_ns: int | None = None
    waited_ns: int = 0
    op: str = ""
    shape: tuple[int, ...] | None = None
    site: CallSite | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One collective call of one group. `visits` has every member in group_rank order.

    `waited_for` are the world ranks the others waited for: the missing ones, else, while somebody is still inside, the
    unknown ones, else the one that came last. Empty if nobody waited, or if it cannot be told who came last.
    """

    group: GroupInfo
    sequence: int
    op: str
    visits: tuple[Visit, ...]
    waited_for: tuple[int, ...]

    @property
    def missing(self) -> tuple[int, ...]:
        """World ranks that certainly never came."""
        return tuple(v.world_rank for v in self.visits if v.presence is Presence.MISSING)

    @property
    def unknown(self) -> tuple[int, ...]:
        """World ranks of which nothing is known."""
        return tuple(v.world_rank for v in self.visits if v.presence is Presence.UNKNOWN)

    @property
    def waiting(self) -> tuple[int, ...]:
        """World ranks still inside."""
        return tuple(v.world_rank for v in self.visits if v.presence is Presence.WAITING)

    @property
    def start_ns(self) -> int:
        """The first moment recorded of the call."""
        return min(t for v in self.visits for t in (v.arrive_ns, v.leave_ns) if t is not None)

    @property
    def waited_ns(self) -> int:
        """The longest wait of any member."""
        return max(v.waited_ns for v in self.visits)

    def __str__(self) -> str:
        return f"{self.op} #{self.sequence} on {self.group}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """Calls in the order in which they began, and the ranks they concern. Units: ns on the trace's clock."""

    calls: tuple[Call, ...]
    world_ranks: tuple[int, ...]
    start_ns: int
    end_ns: int
    complete: bool
    num_clocks: int = 1

    @property
    def stuck(self) -> tuple[Call, ...]:
        """Calls in which somebody was still waiting at the end."""
        return tuple(c for c in self.calls if c.waiting)

    def of_group(self, kind: str) -> Lanes:
        """The same, with the calls of one kind only."""
        calls = tuple(c for c in self.calls if c.group.key.kind == kind)
        return Lanes(
            calls=calls,
            world_ranks=tuple(sorted({v.world_rank for c in calls for v in c.visits})),
            start_ns=self.start_ns,
            end_ns=self.end_ns,
            complete=self.complete,
            num_clocks=self.num_clocks,
        )


def rendezvous_lanes(source: Trace | Iterable[Event], *, until_ns: int | None = None) -> Lanes:
    """Every collective call on a group, as seen by all its members.

    Members of a call are those with the same group (kind, ranks, generation; and, for a rank that made several such
    groups, the same place among them) and sequence. Point-to-point calls and calls of no group are left out.
    `until_ns` is the moment up to which waits are counted, on the trace's clock: the time of reading, for a job that
    hangs; by default the last event. From bare events, a rank that has any is taken to be whole, any other is unknown.
    """
    trace = source if isinstance(source, Trace) else None
    events = source.events if isinstance(source, Trace) else tuple(source)
    last_ns = max((e.time_ns for e in events), default=0)
    known = _Known(trace, events)
    by_call: dict[tuple[_Name, int], dict[int, RankCall]] = {}
    for rank_call in pair_calls(events):
        event = rank_call.event
        if event.group is not None and event.peer_world_rank is None:
            name = known.name(event.world_rank, event.group)
            by_call.setdefault((name, event.sequence), {})[event.world_rank] = rank_call
    end_ns = max(last_ns, until_ns or 0)
    calls = [_call(name, sequence, came, known, end_ns) for (name, sequence), came in by_call.items()]
    return Lanes(
        calls=tuple(sorted(calls, key=lambda c: (c.start_ns, str(c.group), c.sequence))),
        world_ranks=tuple(sorted(known.whole_ranks | {v.world_rank for c in calls for v in c.visits})),
        start_ns=min((e.time_ns for e in events), default=end_ns),
        end_ns=end_ns,
        complete=trace is None or trace.complete,
        num_clocks=1 if trace is None else trace.num_clocks,
    )


_Name = tuple[GroupKey, int, int]  # key, generation, place among the rank's groups of that key and generation


class _Known:
    """What the traces hold: which groups a rank made, and whether a call it does not hold was certainly never made."""

    def __init__(self, trace: Trace | None, events: Iterable[Event]) -> None:
        groups: dict[int, set[GroupInfo]] = {}
        self._first: dict[tuple[int, GroupInfo], int] = {}
        for event in events:
            groups.setdefault(event.world_rank, set())
            if event.group is not None:
                groups[event.world_rank].add(event.group)
                if event.peer_world_rank is None and event.phase is Phase.BEGIN:
                    self._first.setdefault((event.world_rank, event.group), event.sequence)
        self._ranks = {r.world_rank: r for r in trace.ranks} if trace is not None else {}
        for rank in self._ranks.values():
            groups.setdefault(rank.world_rank, set()).update(rank.groups)
        self.whole_ranks = set(groups)
        self._names: dict[tuple[int, GroupInfo], _Name] = {}
        self._groups: dict[tuple[int, _Name], GroupInfo] = {}
        for world_rank, mine in groups.items():
            places: Counter[tuple[GroupKey, int]] = Counter()
            for group in sorted(mine, key=lambda g: (g.ordinal, g.label)):
                same = (group.key, group.generation)
                name = (*same, places[same])
                places[same] += 1
                self._names[world_rank, group] = name
                self._groups[world_rank, name] = group

    def name(self, world_rank: int, group: GroupInfo) -> _Name:
        return self._names[world_rank, group]

    def never_came(self, world_rank: int, name: _Name, sequence: int) -> bool:
        """True if the rank's trace would hold the call, had it been made."""
        if world_rank not in self.whole_ranks:
            return False
        rank = self._ranks.get(world_rank)
        if rank is None or rank.drops.complete:
            return True
        if rank.drops.damaged or rank.drops.table_lost:
            return False
        group = self._groups.get((world_rank, name))
        if group is None or not rank.drops.of(group):
            return True
        return sequence > self._first.get((world_rank, group), sequence)


def _call(name: _Name, sequence: int, came: dict[int, RankCall], known: _Known, end_ns: int) -> Call:
    first = min(came.values(), key=lambda c: (c.event.time_ns, c.event.world_rank)).event
    assert first.group is not None
    members = (*name[0].world_ranks, *sorted(set(came) - set(name[0].world_ranks)))
    absent = [m for m in members if m not in came]
    missing = [m for m in absent if known.never_came(m, name, sequence)]
    arrivals = {r: c.begin.time_ns for r, c in came.items() if c.begin is not None}
    last_ns = end_ns if absent else max(arrivals.values(), default=end_ns)
    visits = []
    for member in members:
        if member in came:
            visits.append(_visit(came[member], last_ns, end_ns))
        else:
            presence = Presence.MISSING if member in missing else Presence.UNKNOWN
            visits.append(Visit(world_rank=member, presence=presence))
    waited_for: tuple[int, ...] = ()
    if any(v.presence is Presence.WAITING for v in visits) and absent:
        waited_for = tuple(missing or absent)
    elif missing:
        waited_for = tuple(missing)
    elif not absent and any(v.waited_ns for v in visits):
        waited_for = (max(arrivals, key=lambda r: (arrivals[r], r)),)
    return Call(group=first.group, sequence=sequence, op=first.op, visits=tuple(visits), waited_for=waited_for)


def _visit(call: RankCall, last_ns: int, end_ns: int) -> Visit:
    """`last_ns` is the last arrival, or the end of the trace while somebody has not come."""
    event, begin, end = call.event, call.begin, call.end
    presence = Presence.WAITING if end is None else Presence.FAILED if end.error else Presence.LEFT
    waited_ns = 0
    if begin is not None:
        waited_ns = max(min(last_ns, end_ns if end is None else end.time_ns) - begin.time_ns, 0)
    return Visit(
        world_rank=event.world_rank,
        presence=presence,
        arrive_ns=None if begin is None else begin.time_ns,
        leave_ns=None if end is None else end.time_ns,
        waited_ns=waited_ns,
        op=event.op,
        shape=event.shape,
        site=event.site,
        error="" if end is None else end.error,
    )
