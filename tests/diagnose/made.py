"""Traces made by hand, a call a line: ranks are given in the order in which they do things."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.ranks import GroupKey
from workbench.trace import CallSite, Drops, Event, GroupInfo, Header, Phase, RankTrace, Trace, align

START_NS = 1_700_000_000_000_000_000


def group(kind: str, *world_ranks: int, ordinal: int = 0, label: str = "", generation: int = 0) -> GroupInfo:
    return GroupInfo(GroupKey(kind, world_ranks), label, ordinal, generation)


def site(line: int, function: str = "main", file: str = "train.py") -> CallSite:
    return CallSite(function, file, line)


@dataclass
class Made:
    """Events of several ranks on one clock; each one is a microsecond after the one before, whoever makes it."""

    world_size: int
    events: dict[int, list[Event]] = field(default_factory=dict)
    groups: dict[int, dict[GroupInfo, None]] = field(default_factory=dict)
    now_us: int = 0
    declared: tuple[str, ...] = ()
    drops: Mapping[int, Drops] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank in range(self.world_size):
            self.events[rank], self.groups[rank] = [], {}

    def begin(
        self, rank: int, op: str, info: GroupInfo | None = None, *, sequence: int | None = None, **fields: Any
    ) -> Event:
        """A call that has begun; `end` ends it. sequence: default: the next of its group, or peer."""
        said: dict[str, Any] = {"site": site(41)}
        if op == "all_reduce":
            said |= {"shape": (8, 64), "dtype": "float32", "reduce_op": "sum", "stride_class": "contiguous"}
        return self._add(rank, Phase.BEGIN, op, info, said | fields, sequence=sequence)

    def end(self, begun: Event, error: str = "") -> Event:
        return self._add(
            begun.world_rank, Phase.END, begun.op, begun.group, {"error": error}, like=begun, sequence=begun.sequence
        )

    def call(self, rank: int, op: str, info: GroupInfo | None = None, *, error: str = "", **fields: Any) -> Event:
        """A call, begin and end."""
        return self.end(self.begin(rank, op, info, **fields), error)

    def instant(self, rank: int, op: str, **fields: Any) -> Event:
        return self._add(rank, Phase.INSTANT, op, None, fields)

    def exit(self, *ranks: int, status: int = 0) -> None:
        for rank in ranks:
            self.instant(rank, "exit", note=f"status={status}")

    def pause(self, seconds: float) -> None:
        self.now_us += int(seconds * 1e6)

    def trace(self, without: Iterable[int] = ()) -> Trace:
        ranks = []
        for rank in sorted(set(range(self.world_size)) - set(without)):
            header = Header(world_rank=rank, host="node0", boot_id="b", pid=100 + rank, anchor_wall_ns=START_NS)
            ranks.append(
                RankTrace(
                    header=header,
                    events=tuple(self.events[rank]),
                    drops=self.drops.get(rank, Drops()),
                    groups=tuple(self.groups[rank]),
                    declared=self.declared,
                )
            )
        return align(ranks)

    @property
    def now_ns(self) -> int:
        return START_NS + self.now_us * 1000

    def _add(
        self,
        rank: int,
        phase: Phase,
        op: str,
        info: GroupInfo | None,
        fields: Mapping[str, Any],
        like: Event | None = None,
        sequence: int | None = None,
    ) -> Event:
        from dataclasses import replace

        self.now_us += 1
        if info is not None:
            self.groups[rank].setdefault(info)
        if sequence is None:
            peer = fields.get("peer_world_rank")
            sequence = 1 + sum(
                e.phase is Phase.BEGIN
                and e.group == info
                and e.peer_world_rank == peer
                and (peer is None or e.op == op)
                for e in self.events[rank]
            )
        base = {
            "time_ns": self.now_us * 1000,
            "phase": phase,
            "ordinal": len(self.events[rank]),
        }
        if like is not None:
            event = replace(like, **base, **fields)
        else:
            event = Event(**base, world_rank=rank, op=op, group=info, sequence=sequence, **fields)
        self.events[rank].append(event)
        return event
