"""Whether directories hold the traces of one run on several nodes, and not of several runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path

from workbench.errors import ArgumentError
from workbench.observe import read_run_id
from workbench.trace import Trace, TraceError, read_directory

_CLOCKS_AGREE_S = 3600.0  # of two hosts; ranks of one boot share a clock


def trace_directories(directories: Sequence[Path]) -> tuple[Path, ...]:
    """Where in these directories, or below them, the trace files are.

    Raises: ArgumentError for a directory without any, and for directories of different runs.
    """
    found = tuple(dict.fromkeys(trace for directory in directories for trace in _traces_in(directory)))
    traces = {directory: trace for directory in found if (trace := _read(directory)) is not None}
    for a, b in combinations(traces, 2):
        differs = _difference(a, traces[a], b, traces[b])
        if differs:
            raise ArgumentError(
                f"{a} ({_span_text(traces[a])}) and {b} ({_span_text(traces[b])}) are of different runs: {differs}; "
                f"several directories must be of the nodes of one run: diagnose these one by one"
            )
    return found


def _traces_in(directory: Path) -> list[Path]:
    """The directories of trace files in or below this one, by name; that of a command's first job for all its jobs."""
    found = {
        file.parent.parent if re.fullmatch(r"job-\d+", file.parent.name) else file.parent
        for file in directory.rglob("*.wbtrace")
    }
    if not found:
        raise ArgumentError(
            f"{directory}: no trace is there; looked for *.wbtrace in {directory} and below it. Give the directory "
            f"that `workbench trace --out` wrote; a command that did not use torch.distributed leaves no trace"
        )
    return sorted(found)


def _read(directory: Path) -> Trace | None:
    try:
        return read_directory(directory)
    except TraceError:
        return None  # judging says what is wrong with it


def _difference(a: Path, trace: Trace, b: Path, other: Trace) -> str:
    """Why the two cannot be of one run; "" if they can."""
    ids = [read_run_id(a), read_run_id(b)]
    if all(ids) and ids[0] != ids[1]:
        return f"torchrun's run ids are {ids[0]} and {ids[1]}"
    shared = sorted(set(trace.world_ranks) & set(other.world_ranks))
    if shared and trace.attempt == other.attempt:
        return f"both hold world rank {shared[0]}"
    (start, end), (other_start, other_end) = _span_s(trace), _span_s(other)
    apart_s = max(other_start - end, start - other_end)
    boots = {r.header.boot_id for r in trace.ranks} & {r.header.boot_id for r in other.ranks}
    if apart_s > (0 if boots else _CLOCKS_AGREE_S):
        return f"one ended {apart_s:.0f} s before the other began"
    return ""


def _span_s(trace: Trace) -> tuple[float, float]:
    """From the first start of a rank to the last event, seconds since 1970."""
    starts = [r.header.anchor_wall_ns for r in trace.ranks]
    return min(starts) / 1e9, max([*starts, *(e.time_ns for e in trace.events)]) / 1e9


def _span_text(trace: Trace) -> str:
    start, end = (datetime.fromtimestamp(s, UTC).strftime("%Y-%m-%d %H:%M:%S") for s in _span_s(trace))
    return f"{start} to {end} UTC"
