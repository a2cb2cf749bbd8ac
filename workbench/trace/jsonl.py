"""A Trace as JSON lines, and back: one line a rank, then one an event."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from workbench.trace.event import Event, GroupInfo, Json, TraceError
from workbench.trace.records import Drops, Header, RankTrace, Trace, align

SCHEMA = 1


def to_jsonl(trace: Trace) -> str:
    """Lines of JSON. The first names the schema; then each rank's header and drops, then its events.

    Units: an event's time_ns is its rank's monotonic clock; wall_ns beside it is the same moment on the common clock.
    """
    return "\n".join(json.dumps(line) for line in _lines(trace)) + "\n"


def from_jsonl(text: str) -> Trace:
    """The trace that to_jsonl wrote; equal to it. Raises TraceError with the number of the line that makes no sense."""
    ranks: list[tuple[Mapping[str, Json], list[Event]]] = []
    first: Mapping[str, Json] = {}
    if not text.strip():
        raise TraceError("not a trace as JSON lines: no line")
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            data = json.loads(line)
            if number == 1:
                first = data
                if data.get("schema") != SCHEMA:
                    raise TraceError(f"schema {data.get('schema')!r:.40}, this version reads {SCHEMA}")
            elif "header" in data:
                ranks.append((data, []))
            elif not ranks:
                raise TraceError("an event before the first rank")
            else:
                ranks[-1][1].append(Event.from_json(data))
        except (TraceError, ValueError, AttributeError, TypeError, RecursionError) as e:
            raise TraceError(f"line {number}: {e}") from None
    try:
        return align(
            [_rank(data, events) for data, events in ranks],
            attempts=tuple(first.get("attempts", ())),
            unreadable=tuple((str(p), str(t)) for p, t in first.get("unreadable", ())),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise TraceError(f"not a trace as JSON lines: {type(e).__name__}: {e}") from None


def _lines(trace: Trace) -> Iterator[Json]:
    yield {"schema": SCHEMA, "attempts": list(trace.attempts), "unreadable": [list(u) for u in trace.unreadable]}
    wall = {(e.world_rank, e.ordinal): e.time_ns for e in trace.events}
    for rank in trace.ranks:
        header, drops = rank.header, rank.drops
        yield {
            "header": {**{n: getattr(header, n) for n in _HEADER}, "versions": dict(header.versions)},
            "drops": {
                "total": drops.total,
                "by_group": [[None if g is None else g.to_json(), n] for g, n in drops.by_group],
                "table_lost": drops.table_lost,
                "damaged": drops.damaged,
            },
            "groups": [g.to_json() for g in rank.groups],
            "declared": list(rank.declared),
        }
        for event in rank.events:
            yield {**event.to_json(), "wall_ns": wall[event.world_rank, event.ordinal]}


_HEADER = (
    *("world_rank", "attempt", "host", "boot_id", "pid"),
    *("anchor_monotonic_ns", "anchor_wall_ns", "closed_ns"),
)


def _rank(data: Mapping[str, Json], events: list[Event]) -> RankTrace:
    header, drops = data["header"], data["drops"]
    return RankTrace(
        header=Header(**{n: header[n] for n in _HEADER}, versions=tuple(header["versions"].items())),
        events=tuple(events),
        drops=Drops(
            total=int(drops["total"]),
            by_group=tuple((None if g is None else GroupInfo.from_json(g), int(n)) for g, n in drops["by_group"]),
            table_lost=int(drops["table_lost"]),
            damaged=int(drops["damaged"]),
        ),
        groups=tuple(GroupInfo.from_json(g) for g in data["groups"]),
        declared=tuple(str(d) for d in data["declared"]),
    )
