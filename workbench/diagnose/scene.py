"""Scene: a trace, indexed for the rules. Which calls met, who is still inside, who is gone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from workbench.trace import CallSite, Event, GroupInfo, Phase, RankCall, RankTrace, Trace, pair_calls

CREATION = frozenset({"init_process_group", "new_group", "destroy_process_group"})
"""Calls about groups; each rank's list of them is its plan."""

OBJECTS = frozenset(
    {
        *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
        *("broadcast_object", "monitored_barrier", "symm_mem_rendezvous", "workspace", "prepare", "freeze"),
    }
)
"""Exchanges between hosts: what a rendezvous is made of."""

_NO_MEETING = CREATION | {"wait", "store_wait", "capture", "capture_warm_up", "replay"}


@dataclass(frozen=True, slots=True)
class GroupName:
    """What makes groups of two ranks the same: the members, the generation, the place among equal lists of a rank."""

    world_ranks: tuple[int, ...]
    generation: int
    place: int


@dataclass(frozen=True, slots=True)
class Meeting:
    """One collective call of one group: who came with what, and who did not.

    missing   world ranks that certainly never came: their records are whole
    unknown   world ranks that may have come
    """

    name: GroupName
    group: GroupInfo
    sequence: int
    came: Mapping[int, RankCall]
    missing: tuple[int, ...]
    unknown: tuple[int, ...]

    @property
    def absent(self) -> tuple[int, ...]:
        return tuple(sorted((*self.missing, *self.unknown)))

    @property
    def first(self) -> RankCall:
        """The call of whoever came first."""
        return min(self.came.values(), key=lambda c: (c.event.time_ns, c.event.world_rank))

    @property
    def failed(self) -> tuple[int, ...]:
        """World ranks whose call raised."""
        return tuple(sorted(r for r, c in self.came.items() if c.end is not None and c.end.error))

    def parties(self, said: Mapping[int, object]) -> list[tuple[object, tuple[int, ...]]]:
        """What was said and by whom, the largest party first; of equal ones that with the lowest world rank."""
        return parties(said)


@dataclass(slots=True)
class RankStory:
    """What one rank did, in its own order. Inner steps of object collectives are left out of `calls`."""

    world_rank: int
    trace: RankTrace
    calls: list[RankCall] = field(default_factory=list)
    inner: list[RankCall] = field(default_factory=list)
    instants: list[Event] = field(default_factory=list)

    @property
    def exception(self) -> Event | None:
        """The exception that ended the rank."""
        return next((e for e in self.instants if e.op == "exception"), None)

    @property
    def exit_status(self) -> int | None:
        """Its exit status; None if it runs or was killed."""
        for e in self.instants:
            if e.op == "exit" and e.note.startswith("status="):
                text = e.note.removeprefix("status=").split()[0]
                return int(text) if text.lstrip("-").isdigit() else None
        return None

    @property
    def last_ns(self) -> int:
        """Its last sign of life, on the trace's clock."""
        times = [e.time_ns for c in (*self.calls[-1:], *self.inner[-1:]) for e in (c.begin, c.end) if e is not None]
        times += [e.time_ns for e in self.instants[-1:]]
        return max(times, default=0)

    @property
    def inside(self) -> RankCall | None:
        """The call it stands in: begun, not ended, and not left behind as an asynchronous one."""
        return next((c for c in reversed(self.calls) if c.end is None and not is_async(c)), None)


class Scene:
    """Everything the rules look at. Made once a diagnosis; nothing in it changes.

    now_ns: the moment of looking, for a job that may still run; None for a job that is over.
    patience_ns: how long a wait on a rank that is alive may take.
    dead: world ranks whose process is known to be gone.
    """

    def __init__(self, trace: Trace, *, now_ns: int | None, patience_ns: int, dead: Iterable[int] = ()) -> None:
        self.trace = trace
        self.running = now_ns is not None
        self.end_ns = now_ns if now_ns is not None else max((e.time_ns for e in trace.events), default=0)
        self.patience_ns = patience_ns if self.running else 0
        self.dead = frozenset(dead)
        self.ranks = {r.world_rank: RankStory(r.world_rank, r) for r in trace.ranks}
        for event in trace.events:
            if event.phase is Phase.INSTANT:
                self.ranks[event.world_rank].instants.append(event)
        for call in pair_calls(trace.events):
            story = self.ranks[call.event.world_rank]
            (story.inner if is_inner(call.event) else story.calls).append(call)
        self._names = self._name_groups()

    @cached_property
    def meetings(self) -> dict[GroupName, list[Meeting]]:
        """The collective calls of each group, in the order of their sequence."""
        came: dict[GroupName, dict[int, dict[int, RankCall]]] = defaultdict(lambda: defaultdict(dict))
        for rank, story in self.ranks.items():
            names = self._names[rank]
            for call in story.calls:
                event = call.event
                if event.group is not None and is_meeting(event):
                    came[names[id(event.group)]][event.sequence][rank] = call
        found = {}
        for name, by_sequence in came.items():
            found[name] = [self._meeting(name, n, by_sequence[n]) for n in sorted(by_sequence)]
        return found

    def is_gone(self, world_rank: int) -> bool:
        """Whether the rank's process has certainly ended, or is about to."""
        story = self.ranks.get(world_rank)
        if world_rank in self.dead:
            return True
        return story is not None and (story.exception is not None or any(e.op == "exit" for e in story.instants))

    def waits_in(self, meeting: Meeting) -> tuple[int, ...]:
        """World ranks that still wait in the call, and have done so for longer than patience allows."""
        waiting = []
        for rank, call in meeting.came.items():
            if call.begin is None or call.end is not None or self.end_ns - call.begin.time_ns < self.patience_ns:
                continue
            inside = self.ranks[rank].inside
            if inside is not None and (not is_async(call) or inside.event.op == "wait"):
                waiting.append(rank)
        return tuple(sorted(waiting))

    def groups_of(self, world_rank: int) -> Iterator[GroupInfo]:
        """The groups a rank has made or used, in the order it made them."""
        story = self.ranks[world_rank]
        yield from sorted(story.trace.groups, key=lambda g: (g.generation, g.ordinal))

    def _name_groups(self) -> dict[int, dict[int, GroupName]]:
        """By rank and identity of the GroupInfo object: the name under which other ranks know the group."""
        names: dict[int, dict[int, GroupName]] = {}
        for rank, story in self.ranks.items():
            used = {id(c.event.group): c.event.group for c in story.calls if c.event.group and is_meeting(c.event)}
            ordinals: dict[tuple[tuple[int, ...], int], set[int]] = defaultdict(set)
            for group in (*used.values(), *story.trace.groups):
                ordinals[group.world_ranks, group.generation].add(group.ordinal)
            names[rank] = {}
            for number, group in used.items():
                place = sorted(ordinals[group.world_ranks, group.generation]).index(group.ordinal)
                names[rank][number] = GroupName(group.world_ranks, group.generation, place)
        return names

    def _meeting(self, name: GroupName, sequence: int, came: Mapping[int, RankCall]) -> Meeting:
        group = next(iter(came.values())).event.group
        assert group is not None
        missing: list[int] = []
        unknown: list[int] = []
        if len(came) < len(name.world_ranks):
            for rank in name.world_ranks:
                if rank not in came:
                    (missing if self._never_came(rank, sequence, name) else unknown).append(rank)
        return Meeting(name, group, sequence, came, tuple(missing), tuple(unknown))

    def _never_came(self, world_rank: int, sequence: int, name: GroupName) -> bool:
        """True if the rank's records would hold the call, had it been made."""
        story = self.ranks.get(world_rank)
        if story is None:
            return False
        drops = story.trace.drops
        if drops.complete:
            return True
        if drops.damaged or drops.table_lost:
            return False
        for group, _ in drops.by_group:
            if group is not None and group.world_ranks == name.world_ranks:
                kept = [c.event.sequence for c in story.calls if c.event.group == group and is_meeting(c.event)]
                return bool(kept) and sequence > min(kept)
        return True


def parties(said: Mapping[int, object]) -> list[tuple[object, tuple[int, ...]]]:
    """Who said what: the largest party first, of equal ones that with the lowest world rank."""
    found: dict[object, list[int]] = {}
    for rank in sorted(said):
        found.setdefault(said[rank], []).append(rank)
    return sorted(((what, tuple(ranks)) for what, ranks in found.items()), key=lambda p: (-len(p[1]), p[1]))


def at_fault(said: Mapping[int, object]) -> tuple[int, ...]:
    """The world ranks outside the largest party; all of them if there is no single largest."""
    found = parties(said)
    if len(found) > 1 and len(found[0][1]) == len(found[1][1]):
        return tuple(sorted(said))
    return tuple(sorted(r for _, ranks in found[1:] for r in ranks))


def is_meeting(event: Event) -> bool:
    """Whether all members of the event's group make this call together."""
    return event.peer_world_rank is None and event.op not in _NO_MEETING and event.op not in ("send", "recv")


def marks(event: Event) -> tuple[str, ...]:
    """The remarks and the note of an event, one by one: "async", "default group", "inside all_gather_object"..."""
    return tuple(event.note.split("; ")) if event.note else ()


def is_async(call: RankCall) -> bool:
    """Whether the call was issued and left, to be waited for later."""
    return call.begin is not None and "async" in marks(call.begin)


def is_inner(event: Event) -> bool:
    """Whether the call is a step of an object collective, and not the program's own."""
    return event.note != "" and any(mark.startswith("inside ") for mark in marks(event))


def same_line(a: CallSite | None, b: CallSite | None) -> bool:
    """Whether two calls come from one line of the program; unknown lines count as one."""
    return a is None or b is None or (a.file, a.line) == (b.file, b.line)
