"""A Trace for chrome://tracing and Perfetto: a process a rank, a thread a group."""

from __future__ import annotations

from workbench.trace.calls import group_name, pair_calls
from workbench.trace.event import Event, GroupInfo, Json, Phase
from workbench.trace.records import Trace


def to_chrome(trace: Trace) -> dict[str, Json]:
    """A JSON object in the Trace Event Format. Times in microseconds since the trace's first event.

    A call that never ended is a begin without an end, which viewers draw up to the end of the picture.
    """
    start_ns = trace.events[0].time_ns if trace.events else 0
    lines: list[Json] = []
    threads: dict[tuple[int, GroupInfo | None], int] = {}
    for rank in trace.ranks:
        header = rank.header
        name = f"rank {rank.world_rank} ({header.host}, pid {header.pid})"
        lines.append(_meta("process_name", rank.world_rank, 0, {"name": name}))
        lines.append(_meta("process_sort_index", rank.world_rank, 0, {"sort_index": rank.world_rank}))
        groups = dict.fromkeys([None, *rank.groups, *(e.group for e in rank.events)])
        for number, group in enumerate(groups):
            threads[rank.world_rank, group] = number
            lines.append(_meta("thread_name", rank.world_rank, number, {"name": group_name(group)}))
    for call in pair_calls(trace.events):
        if call.begin is None:
            continue
        line = _line(call.begin, "B", start_ns, threads)
        if call.end is not None:
            line |= {"ph": "X", "dur": (call.end.time_ns - call.begin.time_ns) / 1000}
            if call.end.error:
                line["args"]["error"] = call.end.error
        lines.append(line)
    for event in trace.events:
        if event.phase is Phase.INSTANT:
            lines.append(_line(event, "i", start_ns, threads) | {"s": "t"})
    return {"displayTimeUnit": "ns", "traceEvents": lines}


def _meta(name: str, pid: int, tid: int, args: dict[str, Json]) -> Json:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _line(event: Event, phase: str, start_ns: int, threads: dict[tuple[int, GroupInfo | None], int]) -> dict[str, Json]:
    said = event.to_json()
    args = {k: v for k, v in said.items() if k not in ("time_ns", "world_rank", "phase", "op", "group", "site")}
    if event.group is not None:
        args["group"] = str(event.group)
    if event.site is not None:
        args["site"] = str(event.site)
    return {
        "ph": phase,
        "name": event.op,
        "cat": "instant" if phase == "i" else "call",
        "ts": (event.time_ns - start_ns) / 1000,
        "pid": event.world_rank,
        "tid": threads.get((event.world_rank, event.group), 0),
        "args": args,
    }
