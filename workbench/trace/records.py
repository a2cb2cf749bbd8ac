"""RankTrace and Trace: what was read of one rank, and of all ranks on one clock. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from workbench.trace.event import Event, GroupInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Who wrote a file, and one moment read on both clocks. `closed_ns` is None for a rank that runs or was killed."""

    world_rank: int
    attempt: int = 0
    host: str = ""
    boot_id: str = ""
    pid: int = 0
    anchor_monotonic_ns: int = 0
    anchor_wall_ns: int = 0
    versions: tuple[tuple[str, str], ...] = ()
    closed_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drops:
    """What a file no longer holds.

    total        events overwritten by newer ones; `by_group` splits them. None stands for events of no group, and for
                 those of a rank's groups beyond the thousands that have a counter of their own
    table_lost   texts, shapes, groups or call sites that had no room: their events show "?" or None instead
    damaged      records that were cut short or make no sense
    """

    total: int = 0
    by_group: tuple[tuple[GroupInfo | None, int], ...] = ()
    table_lost: int = 0
    damaged: int = 0

    @property
    def complete(self) -> bool:
        """True if no event is missing: only then may an absent event be called a missing call."""
        return self.total == 0 and self.damaged == 0 and self.table_lost == 0

    def of(self, group: GroupInfo | None) -> int:
        """Events of one group that were overwritten."""
        return next((n for g, n in self.by_group if g == group), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """One rank's file: events in the order recorded, times on the rank's monotonic clock.

    `groups` are those the rank opened a lane for, with or without events. `declared` is what the
    program said about itself (JSON texts), such as its group map.
    """

    header: Header
    events: tuple[Event, ...] = ()
    drops: Drops = Drops()
    groups: tuple[GroupInfo, ...] = ()
    declared: tuple[str, ...] = ()

    @property
    def world_rank(self) -> int:
        return self.header.world_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """All ranks of one attempt, in rank order, and their events merged by time (nanoseconds since 1970).

    Ranks of one host share its monotonic clock, so their order is exact. Between hosts the order is as good as their
    wall clocks: `num_clocks` above 1 says so. `unreadable` holds (file, what was found) of files passed over.
    """

    ranks: tuple[RankTrace, ...]
    events: tuple[Event, ...]
    attempt: int = 0
    attempts: tuple[int, ...] = (0,)
    unreadable: tuple[tuple[str, str], ...] = ()
    num_clocks: int = 1

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """The ranks that left a readable file."""
        return tuple(r.world_rank for r in self.ranks)

    def rank(self, world_rank: int) -> RankTrace | None:
        """The trace of one rank, or None if it left no readable file."""
        return next((r for r in self.ranks if r.world_rank == world_rank), None)

    @property
    def complete(self) -> bool:
        """True if no event of the ranks that left a file is missing."""
        return not self.unreadable and all(r.drops.complete for r in self.ranks)


def align(
    ranks: Iterable[RankTrace],
    *,
    attempts: tuple[int, ...] = (),
    unreadable: tuple[tuple[str, str], ...] = (),
) -> Trace:
    """Merge ranks into one Trace, events ordered by time.

    All ranks of one boot of one host get the offset of the lowest of them, which keeps their exact order; different
    hosts meet by their wall clocks.
    """
    ordered = tuple(sorted(ranks, key=lambda r: r.world_rank))
    offsets: dict[object, int] = {}
    events: list[Event] = []
    for rank in ordered:
        clock = rank.header.boot_id or rank.world_rank
        offset = offsets.setdefault(clock, rank.header.anchor_wall_ns - rank.header.anchor_monotonic_ns)
        events.extend(e.moved(offset) for e in rank.events)
    events.sort(key=lambda e: (e.time_ns, e.world_rank, e.ordinal))
    attempt = ordered[0].header.attempt if ordered else 0
    return Trace(
        ranks=ordered,
        events=tuple(events),
        attempt=attempt,
        attempts=attempts or (attempt,),
        unreadable=unreadable,
        num_clocks=max(len(offsets), 1),
    )
