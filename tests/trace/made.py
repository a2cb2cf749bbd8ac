"""Traces made by hand: calls as (rank, group, sequence, arrive, leave), times in microseconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from workbench.ranks import GroupKey
from workbench.trace import CallSite, Drops, Event, GroupInfo, Header, Phase, RankTrace, Trace, align

START_NS = 1_700_000_000_000_000_000


def group(kind: str, *world_ranks: int, ordinal: int = 1, generation: int = 0) -> GroupInfo:
    return GroupInfo(GroupKey(kind, world_ranks), kind, ordinal, generation)


def call(
    world_rank: int,
    info: GroupInfo,
    sequence: int,
    arrive_us: float | None,
    leave_us: float | None = None,
    **fields: Any,
) -> list[Event]:
    """Begin and end of one call; either may be None."""
    said: dict[str, Any] = {"op": "all_reduce", "shape": (8, 64), "dtype": "bfloat16", "reduce_op": "sum"}
    said |= {"site": CallSite("decode", "model.py", 41), **fields}
    error = said.pop("error", "")
    base = {"world_rank": world_rank, "group": info, "sequence": sequence, **said}
    begin = [] if arrive_us is None else [Event(time_ns=int(arrive_us * 1000), phase=Phase.BEGIN, **base)]
    end = [] if leave_us is None else [Event(time_ns=int(leave_us * 1000), phase=Phase.END, error=error, **base)]
    return begin + end


def trace(
    events: Iterable[Event],
    *,
    ranks: Iterable[int],
    drops: Mapping[int, Drops] | None = None,
    groups: Iterable[GroupInfo] = (),
) -> Trace:
    """One trace of all `ranks`, on one host. Every rank has opened those of `groups` that it belongs to."""
    from dataclasses import replace

    traces = []
    mine: dict[int, list[Event]] = {r: [] for r in ranks}
    for event in events:
        mine[event.world_rank].append(event)
    for rank, its in mine.items():
        ordered = sorted(its, key=lambda e: (e.time_ns, e.phase is Phase.BEGIN))
        numbered = tuple(replace(e, ordinal=n) for n, e in enumerate(ordered))
        opened = dict.fromkeys([g for g in groups if rank in g.world_ranks] + [e.group for e in its if e.group])
        header = Header(world_rank=rank, host="node0", boot_id="b", pid=100 + rank, anchor_wall_ns=START_NS)
        traces.append(
            RankTrace(header=header, events=numbered, drops=(drops or {}).get(rank, Drops()), groups=tuple(opened))
        )
    return align(traces)
