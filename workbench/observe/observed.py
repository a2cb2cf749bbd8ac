"""Reads what the processes of a recorded command wrote: one trace of all ranks, with how each of them ended."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from workbench.observe.children import EXITS
from workbench.observe.ended import read_ended, went_well
from workbench.trace import SHUT_DOWN, Event, Phase, RankTrace, Trace, find_members, read_directory


def read_observed(
    *directories: str | os.PathLike[str],
    attempt: int | None = None,
    job: Sequence[str | os.PathLike[str]] | None = None,
) -> Trace:
    """read_directory, and an `exit` event for each rank of which only its parent knows how it ended.

    Of a job that a watcher ended, events end with that moment. `job`: one of find_jobs; default: the first.
    Raises: as read_directory.
    """
    ends: dict[int, _End] = {}
    for directory in directories:
        ends |= _ends(Path(directory))
    ended = read_ended(directories)

    def complete(rank: RankTrace) -> RankTrace:
        rank = _with_exit(rank, ends.get(rank.header.pid))
        if ended is None or rank.header.boot_id != ended.boot_id:
            return rank
        return replace(rank, events=tuple(e for e in rank.events if e.time_ns <= ended.monotonic_ns))

    return find_members(read_directory(*(directories if job is None else job), attempt=attempt, complete=complete))


@dataclass(frozen=True, slots=True)
class _End:
    """Exit status (negative: the signal), when it was noticed, and who sent the signal, in words if that is known."""

    status: int
    time_ns: int
    by: str


def _ends(directory: Path) -> dict[int, _End]:
    """By pid. A line that makes no sense is left out."""
    found = {}
    by_parent = SHUT_DOWN if went_well(directory) else "sent by its parent"
    try:
        lines = (directory / EXITS).read_text(errors="replace").splitlines()
    except OSError:
        return {}
    for line in lines:
        try:
            data = json.loads(line)
            status, time_ns = int(data["status"]), int(data["time_ns"])
            if -64 <= status <= 255 and 0 <= time_ns < 1 << 63:
                found[int(data["pid"])] = _End(status, time_ns, by_parent if data.get("by_parent") is True else "")
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            continue
    return found


def _with_exit(rank: RankTrace, end: _End | None) -> RankTrace:
    if end is None:
        return rank
    status = end.status
    own = next((e for e in rank.events if e.op == "exit"), None)
    if own is not None and own.note.startswith(f"status={status}"):
        return rank
    events = tuple(e for e in rank.events if e is not own)
    note = f"status={status}" if status >= 0 else f"status={status}, signal {-status}"
    note += f", {end.by}" if end.by else ""
    if own is not None:
        return replace(rank, events=tuple(sorted((*events, replace(own, note=note)), key=lambda e: e.ordinal)))
    ordinal = max((e.ordinal for e in events), default=-1) + 1
    told = Event(
        time_ns=end.time_ns, world_rank=rank.world_rank, phase=Phase.INSTANT, op="exit", ordinal=ordinal, note=note
    )
    return replace(rank, events=(*events, told))
