"""Scene: a trace, indexed for the rules. Which calls met, who is still inside, who is gone and how."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from workbench.diagnose.words import group_words
from workbench.trace import (
    ASKING,
    BELOW_PYTHON,
    BY_FUTURE,
    BY_HAND,
    ON_GPU,
    SHUT_DOWN,
    STRANGERS,
    Event,
    GroupInfo,
    Phase,
    RankCall,
    RankTrace,
    Trace,
    pair_calls,
)

CREATION = frozenset({"init_process_group", "new_group", "destroy_process_group"})
"""Calls about groups themselves; the new_group calls of a rank are its plan."""

EXCHANGES = frozenset(
    {
        *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
        *("broadcast_object", "symm_mem_rendezvous", "workspace", "prepare", "freeze"),
    }
)
"""Exchanges between hosts, such as a rendezvous consists of."""

PEERED = frozenset({"send", "recv", "send_object_list", "recv_object_list"})
_NO_MEETING = CREATION | PEERED | {"wait", "store_wait", "capture_door", "capture", "capture_warm_up", "replay"}
UNSEEN = frozenset({BELOW_PYTHON, ON_GPU})
"""Remarks of calls whose wait nobody sees: while they have not ended, the call itself counts as one."""

POLITE = (-1, -2, -15)  # signals by which a launcher or a person ends ranks that are alive
_KILL, _KILL_AFTER_NS = -9, 5_000_000_000  # launchers kill who did not heed those for a long while; others kill at once


@dataclass(frozen=True, slots=True)
class GroupName:
    """What makes groups of two ranks the same: the members, the generation, the place among equal lists of a rank.

    The place of one made by hand is where its members meet.
    """

    world_ranks: tuple[int, ...]
    generation: int
    place: int | str


@dataclass(frozen=True, slots=True)
class Meeting:
    """One collective call of one group: who came with what, and who did not.

    number    which of the group's calls it is, as its events count them: #2 in their lines. 0: the calls
              that are to make the group
    missing   world ranks that certainly never came: their records are whole
    unknown   world ranks that may have come
    """

    name: GroupName
    group: GroupInfo
    number: int
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
    def last_arrival_ns(self) -> int:
        return max(c.event.time_ns for c in self.came.values())

    @property
    def errors(self) -> tuple[str, ...]:
        """What the calls raised, each text once."""
        return tuple(dict.fromkeys(c.end.error for c in self.came.values() if c.end is not None and c.end.error))

    def __str__(self) -> str:
        what = f"call #{self.number}" if self.number else "the beginning"
        return f"{what} of {group_words(self.group)}"


@dataclass(slots=True)
class RankStory:
    """What one rank did, in its own order. Steps inside other calls stand in `inner`, the program's own in `calls`."""

    world_rank: int
    trace: RankTrace
    calls: list[RankCall] = field(default_factory=list)
    inner: list[RankCall] = field(default_factory=list)
    exceptions: list[Event] = field(default_factory=list)
    exit: Event | None = None
    last_ns: int = 0

    @property
    def exit_status(self) -> int | None:
        """Its exit status, negative for a signal; None if it runs, or if nobody noted how it ended."""
        found = re.match(r"status=(-?\d+)", self.exit.note) if self.exit is not None else None
        return int(found[1]) if found else None

    @property
    def exception(self) -> Event | None:
        """The exception that ended the rank, or is about to: nothing was called after it."""
        if not self.exceptions or self.exit_status == 0:
            return None
        latest = self.exceptions[-1]
        if latest in self.thread_exceptions:
            return None
        later = next((c for c in reversed(self.calls) if c.event.op != "destroy_process_group"), None)
        if later is not None and later.event.ordinal > latest.ordinal:
            return None
        return None if latest.error.startswith("KeyboardInterrupt") else latest

    def went_on_after(self, call: RankCall) -> bool:
        """Whether the rank got over what this call raised: it made others since, or ended well."""
        assert call.end is not None
        number = call.end.ordinal
        later = any(c.event.ordinal > number and c.event.op != "destroy_process_group" for c in self.calls)
        return later or self.exit_status == 0

    @property
    def thread_exceptions(self) -> list[Event]:
        """Those that nobody caught in a thread: what the thread was for is not done, and the rank goes on."""
        return [] if self.exit_status == 0 else [e for e in self.exceptions if "in a thread" in marks(e)]

    @property
    def inside(self) -> RankCall | None:
        """The call it stands in: begun, not ended, and not left behind as an asynchronous one."""
        return next((c for c in reversed(self.calls) if c.end is None and not is_async(c)), None)

    @property
    def awaits_future(self) -> bool:
        """Whether it took the future of a call that has not ended: who waits for that is not seen."""
        return any(c.end is None and c.event.op == "wait" and BY_FUTURE in marks(c.event) for c in self.calls)

    @property
    def has_left(self) -> bool:
        """Whether the last thing it did was to destroy its groups: it comes to no further call, however it ends."""
        return bool(self.calls) and self.calls[-1].event.op == "destroy_process_group"

    @property
    def plan(self) -> list[RankCall]:
        """Its new_group calls, in order."""
        return [c for c in self.calls if c.event.op == "new_group" and c.event.group is not None]


class Scene:
    """Everything the rules look at. Made once a diagnosis; nothing in it changes.

    now_ns: the moment of looking, for a job that may still run; None for a job that is over.
    patience_ns: how long a rank that is alive may be waited for.
    dead: world ranks of a running job whose process is gone, though nothing tells how it ended.
    stopped: world ranks of a running job whose process is stopped by a signal or a debugger.
    source: the text of a line of the program, "" where it cannot be had.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        now_ns: int | None,
        patience_ns: int,
        dead: Collection[int] = (),
        stopped: Collection[int] = (),
        source: Callable[[str, int], str] | None = None,
    ) -> None:
        self.trace = trace
        self.running = now_ns is not None
        self.end_ns = max(now_ns or 0, max((e.time_ns for e in trace.events), default=0))
        self.patience_ns = patience_ns if self.running else 0
        self.dead = frozenset(dead) if self.running else frozenset()
        self.stopped = frozenset(stopped) if self.running else frozenset()
        self.source = source or (lambda _file, _line: "")
        self.ranks = {r.world_rank: RankStory(r.world_rank, r) for r in trace.ranks}
        for event in trace.events:
            story = self.ranks[event.world_rank]
            if event.op != "exit":
                story.last_ns = event.time_ns
            if event.phase is Phase.INSTANT:
                if event.op == "exception":
                    story.exceptions.append(event)
                elif event.op == "exit":
                    story.exit = event
        for call in pair_calls(trace.events):
            story = self.ranks[call.event.world_rank]
            (story.inner if is_inner(call.event) else story.calls).append(call)
        self._names = {rank: _name_groups(story) for rank, story in self.ranks.items()}

    @cached_property
    def meetings(self) -> dict[GroupName, list[Meeting]]:
        """The collective calls of each group, in order."""
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

    @cached_property
    def inits(self) -> dict[int, dict[int, RankCall]]:
        """The calls of init_process_group, by generation and world rank."""
        found: dict[int, dict[int, RankCall]] = defaultdict(dict)
        for rank, story in self.ranks.items():
            for call in story.calls:
                if call.event.op == "init_process_group" and call.event.group is not None:
                    found[call.event.group.generation][rank] = call
        return found

    @cached_property
    def beginnings(self) -> list[Meeting]:
        """The calls in which members meet to make a group: the default one, or one with use_local_synchronization.

        Not those of default groups of several sizes, whose members cannot meet.
        """
        came: dict[GroupName, dict[int, RankCall]] = defaultdict(dict)
        for generation, calls in self.inits.items():
            lists = {c.event.group.world_ranks for c in calls.values() if c.event.group is not None}
            if len(lists) == 1:
                came[GroupName(lists.pop(), generation, 0)] = calls
        for rank, story in self.ranks.items():
            for call in story.calls:
                if is_local(call):
                    came[self._names[rank][id(call.event.group)]][rank] = call
        return [self._meeting(name, 0, calls) for name, calls in came.items()]

    @cached_property
    def _first_begun(self) -> dict[tuple[int, GroupName], int]:
        """By rank and group: the first call of which the begin was kept. The ring loses its oldest records first."""
        first: dict[tuple[int, GroupName], int] = {}
        for rank, story in self.ranks.items():
            for call in story.calls:
                if call.begin is not None and call.begin.group is not None and is_meeting(call.begin):
                    first.setdefault((rank, self._names[rank][id(call.event.group)]), call.begin.sequence)
        return first

    @cached_property
    def made(self) -> frozenset[tuple[int, ...]]:
        """The members of every group that was made or used."""
        return frozenset(g.world_ranks for r in self.trace.ranks for g in r.groups)

    @cached_property
    def declared(self) -> dict[frozenset[int], set[str]]:
        """The groups that the program said it means to have, with their kinds; empty if it said nothing."""
        kinds: dict[frozenset[int], set[str]] = defaultdict(set)
        for text in {text for r in self.trace.ranks for text in r.declared}:
            try:
                for kind, lists in json.loads(text)["groups"].items():
                    for ranks in lists:
                        kinds[frozenset(ranks)].add(str(kind))
            except (ValueError, TypeError, KeyError, AttributeError):
                continue
        return dict(kinds)

    @cached_property
    def shut_down(self) -> frozenset[int]:
        """Ranks that their parent ended when they were no longer needed: the command and every other rank did well."""
        by_parent = {
            rank for rank, story in self.ranks.items() if story.exit is not None and story.exit.note.endswith(SHUT_DOWN)
        }
        others_did_well = all(s.exit_status == 0 for rank, s in self.ranks.items() if rank not in by_parent)
        return frozenset(by_parent) if others_did_well else frozenset()

    @cached_property
    def first_failure_ns(self) -> int | None:
        """When the first rank ended with a status other than 0."""
        times = [
            s.exit.time_ns
            for s in self.ranks.values()
            if s.exit is not None and s.exit_status != 0 and s.world_rank not in self.shut_down
        ]
        return min(times, default=None)

    def is_gone(self, world_rank: int) -> bool:
        """Whether the rank ended by itself, so that it certainly comes to no further call."""
        story = self.ranks.get(world_rank)
        if story is None:
            return False
        ended = story.exit is not None and not self.was_ended(world_rank)
        return ended or story.exception is not None or world_rank in self.dead

    def was_ended(self, world_rank: int) -> bool:
        """Whether somebody ended the rank after another one had failed, as launchers do, or when all was done."""
        story = self.ranks[world_rank]
        if world_rank in self.shut_down:
            return True
        if story.exit is None or self.first_failure_ns is None:
            return False
        later_ns = story.exit.time_ns - self.first_failure_ns
        return (story.exit_status in POLITE and later_ns > 0) or (
            story.exit_status == _KILL and later_ns > _KILL_AFTER_NS
        )

    def waits(self, call: RankCall) -> bool:
        """Whether the rank still waits in this call, and has done so for longer than patience allows.

        Nobody sees a wait for what C++ issued, such as a bucket of gradients, and one for a GPU returns before the call
        is done: there the call itself counts.
        """
        if call.begin is None or call.end is not None or self.end_ns - call.begin.time_ns < self.patience_ns:
            return False
        story = self.ranks[call.event.world_rank]
        if call.event.world_rank in self.shut_down:
            return False
        if is_async(call) and not UNSEEN.isdisjoint(marks(call.begin)):
            return story.exit is None or self.was_ended(story.world_rank)
        if is_async(call) and story.awaits_future:
            return True
        return story.inside is not None and (not is_async(call) or story.inside.event.op == "wait")

    def _meeting(self, name: GroupName, number: int, came: Mapping[int, RankCall]) -> Meeting:
        group = next(iter(came.values())).event.group
        assert group is not None
        missing: list[int] = []
        unknown: list[int] = []
        if len(came) < len(name.world_ranks):
            for rank in name.world_ranks:
                if rank not in came:
                    (missing if self._never_came(rank, number, name) else unknown).append(rank)
        return Meeting(name, group, number, came, tuple(missing), tuple(unknown))

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
        if all(group is None or group.world_ranks != name.world_ranks for group, _ in drops.by_group):
            return True
        return sequence > self._first_begun.get((world_rank, name), sequence)


def marks(event: Event) -> tuple[str, ...]:
    """The remarks and the note of an event, one by one: "async", "default group", "inside all_gather_object"..."""
    return tuple(event.note.split("; ")) if event.note else ()


def store_keys(event: Event) -> list[str]:
    """The keys that a store_wait waits for, sorted; one empty key if none was recorded."""
    words = list(marks(event))
    while words and (words[0].startswith("inside ") or words[0] == ASKING):
        words.pop(0)
    return sorted("; ".join(words).split(", "))


def is_meeting(event: Event) -> bool:
    """Whether all members of the event's group make this call together."""
    words = marks(event)
    is_alone = "non-member" in words or STRANGERS in words
    return event.peer_world_rank is None and event.op not in _NO_MEETING and not is_alone


def is_async(call: RankCall) -> bool:
    """Whether the call was issued and left, to be waited for later."""
    return call.begin is not None and "async" in marks(call.begin)


def is_local(call: RankCall) -> bool:
    """Whether the call makes a group with use_local_synchronization: then torch names it by a hash of its members."""
    group = call.event.group
    return call.event.op == "new_group" and group is not None and re.fullmatch(r"[0-9a-f]{40}", group.label) is not None


def is_inner(event: Event) -> bool:
    """Whether the call is a step of another one, and not the program's own."""
    return event.note != "" and any(mark.startswith("inside ") for mark in marks(event))


def _name_groups(story: RankStory) -> dict[int, GroupName]:
    """By identity of the GroupInfo object: the name under which other ranks know the group."""
    used = {id(c.event.group): c.event.group for c in story.calls if c.event.group is not None}
    ordinals: dict[tuple[tuple[int, ...], int], set[int]] = defaultdict(set)
    counted = [g for g in (*used.values(), *story.trace.groups) if g.key.kind != BY_HAND]
    for group in counted:
        ordinals[group.world_ranks, group.generation].add(group.ordinal)
    places = {same: {ordinal: place for place, ordinal in enumerate(sorted(o))} for same, o in ordinals.items()}
    names = {}
    for number, group in used.items():
        by_hand = group.key.kind == BY_HAND
        place = group.label if by_hand else places[group.world_ranks, group.generation][group.ordinal]
        names[number] = GroupName(group.world_ranks, group.generation, place)
    return names
