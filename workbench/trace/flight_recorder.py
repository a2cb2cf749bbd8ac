"""PyTorch's Flight Recorder: a Trace as dumps that `torchfrtrace` analyses, and dumps as a Trace. No torch needed.

Layout 2.10. Reading unpickles nothing but plain lists, dicts, texts and numbers; the JSON form is read as it is.
Source: torch 2.13, torch/distributed/flight_recorder; pinned by tests/trace/test_flight_recorder.py, which runs torch's
own analyser on what this module writes.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from workbench.ranks import GroupKey
from workbench.trace.calls import RankCall, pair_calls
from workbench.trace.event import CallSite, Event, GroupInfo, Json, Phase, TraceError
from workbench.trace.layout import MAX_FILE_BYTES
from workbench.trace.plain_pickle import load_plain_pickle
from workbench.trace.records import Header, RankTrace, Trace, align

VERSION = "2.10"

T = TypeVar("T")


def to_flight_recorder(trace: Trace) -> dict[int, dict[str, Json]]:
    """A dump for each rank. What a dump cannot say (root, reduce op, path ...) stands under "workbench" in each entry.

    Calls of unknown operations appear as barriers, a fused all-reduce as an all-reduce. Point-to-point calls and calls
    of no group are left out: the analyser expects every member of a group in every entry. Where a ring has dropped
    calls, the group begins at the first call that all its members still have.
    """
    first = _first_complete(trace)
    calls: dict[int, list[RankCall]] = {r: [] for r in trace.world_ranks}
    for call in pair_calls(trace.events):
        begin = call.begin
        if begin is None or begin.group is None or begin.peer_world_rank is not None:
            continue
        if begin.sequence >= first.get(_name(begin.group), 1):
            calls[begin.world_rank].append(call)
    return {rank.world_rank: _dump(rank, calls[rank.world_rank]) for rank in trace.ranks}


def write_flight_recorder(trace: Trace, directory: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Write the dumps as `torchfrtrace DIRECTORY` reads them: one pickle a rank, fr_rank_0, fr_rank_1 ..."""
    folder = Path(directory)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    paths = []
    for world_rank, dump in to_flight_recorder(trace).items():
        path = folder / f"fr_rank_{world_rank}"
        path.write_bytes(pickle.dumps(dump))
        paths.append(path)
    return tuple(paths)


def read_flight_recorder(
    directory: str | os.PathLike[str], *, groups: Mapping[str, Sequence[int]] | None = None
) -> Trace:
    """Read a directory of dumps, JSON or pickle; a file's rank is the number its name ends in (before `.json`).

    Raises: TraceError for a file that is no dump, naming it, or a directory without any; OSError.
    """
    dumps: dict[int, Mapping[str, Json]] = {}
    for path in sorted(Path(directory).iterdir()):
        match = re.search(r"(\d{1,9})(\.json|\.pkl|\.pickle)?$", path.name)
        if match and path.is_file():
            if path.stat().st_size > MAX_FILE_BYTES:
                raise TraceError(f"{path}: {path.stat().st_size} bytes, a dump is read up to {MAX_FILE_BYTES}")
            try:
                dumps[int(match[1])] = load_dump(path.read_bytes())
            except TraceError as e:
                raise TraceError(f"{path}: {e}") from None
    if not dumps:
        raise TraceError(f"no Flight Recorder dump in {directory}: no file whose name ends in a rank")
    return from_flight_recorder(dumps, groups=groups)


def from_flight_recorder(
    dumps: Mapping[int, Mapping[str, Json]], *, groups: Mapping[str, Sequence[int]] | None = None
) -> Trace:
    """Dumps by world rank as a Trace. Pure.

    Members of a group come from `groups` (name or description -> world ranks), else from the dumps' own group table,
    else (gloo leaves it empty) the default group is all ranks and any other group the ranks that used it.
    A call that finished at an unknown time, as all of gloo's, ends when it began and says so in its note.
    Raises: TraceError for a dump of another layout.
    """
    used: dict[str, set[int]] = {}
    for world_rank, dump in dumps.items():
        for entry in _entries(dump):
            used.setdefault(_names(entry)[0], set()).add(world_rank)
    world = tuple(range(max(dumps, default=-1) + 1))
    traces = []
    for world_rank, dump in sorted(dumps.items()):
        table = _group_table(dump)

        def find(name: str, desc: str, table: Mapping[str, tuple[int, ...]] = table) -> tuple[int, ...]:
            given = (groups or {}).get(name) or (groups or {}).get(desc)
            if given:
                return tuple(given)
            return table.get(name) or (world if desc == "default_pg" else tuple(sorted(used.get(name, ()))))

        events: list[Event] = []
        for entry in _entries(dump):
            events.extend(_events(world_rank, entry, find, len(events)))
        seen = dict.fromkeys(e.group for e in events if e.group is not None)
        traces.append(RankTrace(header=Header(world_rank=world_rank), events=tuple(events), groups=tuple(seen)))
    return align(traces)


def load_dump(data: bytes | str) -> Mapping[str, Json]:
    """One dump from JSON (`_dump_fr_trace_json`) or from a pickle of plain containers (`_dump_fr_trace`).

    Raises: TraceError for anything else; a pickle that names a class or function is refused before it is run.
    """
    raw = data.encode() if isinstance(data, str) else data
    try:
        dump = load_plain_pickle(raw) if raw[:1] == b"\x80" else json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise TraceError(f"neither a JSON dump nor a plain pickle: {type(e).__name__}: {e}") from None
    if not isinstance(dump, dict) or not isinstance(dump.get("entries"), list):
        raise TraceError("not a Flight Recorder dump: no list of entries")
    version = dump.get("version")
    if not isinstance(version, str) or not version.startswith("2."):
        raise TraceError(f"a dump of version {_show(version)}; this version reads 2.x")
    return dump


_RANK_LIST = re.compile(r"\[\s*\d{1,9}(\s*,\s*\d{1,9})*\s*\]")
_Find = Callable[[str, str], tuple[int, ...]]  # a group's name and description -> its world ranks

# Operation -> the analyser's word. The rest appear as barriers, which the analyser compares by sizes only.
_WORDS = {
    "all_reduce": "all_reduce",
    "all_reduce_add_rms_norm": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_into_tensor": "_all_gather_base",
    "_all_gather_base": "_all_gather_base",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "_reduce_scatter_base": "_reduce_scatter_base",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
}
_DTYPES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int8": "Char",
    "uint8": "Byte",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "bool": "Bool",
    "float8_e4m3fn": "Float8_e4m3fn",
    "float8_e5m2": "Float8_e5m2",
}
_DTYPES_BACK = {word: dtype for dtype, word in _DTYPES.items()}


def _name(group: GroupInfo) -> str:
    """Equal on all members, and different for any two groups of a rank."""
    return f"{group.key}" if group.generation == 0 else f"{group.key}@{group.generation}"


def _first_complete(trace: Trace) -> dict[str, int]:
    """For each group that lost events on some rank, the first sequence that every member still has from its begin."""
    first: dict[str, int] = {}
    for rank in trace.ranks:
        for group in rank.groups:
            if rank.drops.of(group):
                kept = [
                    e.sequence
                    for e in rank.events
                    if e.group == group and e.phase is Phase.BEGIN and e.peer_world_rank is None
                ]
                first[_name(group)] = max(first.get(_name(group), 1), min(kept, default=1 << 62))
    return first


def _dump(rank: RankTrace, calls: Sequence[RankCall]) -> dict[str, Json]:
    groups = dict.fromkeys([*rank.groups, *(c.event.group for c in calls)])
    config = {
        _name(g): {"name": _name(g), "desc": g.key.kind, "ranks": str(list(g.world_ranks))}
        for g in groups
        if g is not None
    }
    status = {}
    for name in config:
        mine = [c for c in calls if c.event.group is not None and _name(c.event.group) == name]
        begun = max((c.event.sequence for c in mine), default=-1)
        ended = max((c.event.sequence for c in mine if _is_done(c)), default=-1)
        status[name] = {
            "last_enqueued_collective": begun,
            "last_started_collective": begun,
            "last_completed_collective": ended,
        }
    entries = [_entry(number, call) for number, call in enumerate(calls)]
    return {
        "version": VERSION,
        "pg_config": config,
        "comm_lib_version": "",
        "pg_status": status,
        "entries": entries,
    }


def _is_done(call: RankCall) -> bool:
    return call.end is not None and not call.end.error


def _entry(number: int, call: RankCall) -> dict[str, Json]:
    event = call.event
    assert event.group is not None
    word = _WORDS.get(event.op, "barrier")
    shape = list(event.shape or ())
    dtype = [_DTYPES.get(event.dtype or "", event.dtype or "")]
    extra = {
        "op": event.op,
        "label": event.group.label,
        "ordinal": event.group.ordinal,
        "root_group_rank": event.root_group_rank,
        "root_world_rank": event.root_world_rank,
        "reduce_op": event.reduce_op,
        "stride_class": event.stride_class,
        "path": event.path,
        "capture": event.capture,
    }
    return {
        "record_id": number,
        "pg_id": event.group.ordinal,
        "process_group": (_name(event.group), event.group.key.kind),
        "collective_seq_id": event.sequence,
        "p2p_seq_id": 0,
        "op_id": event.sequence,
        "profiling_name": f"nccl:{word}",  # what every torchfrtrace accepts; older ones know no gloo
        "time_created_ns": event.time_ns,
        "input_sizes": [shape],
        "input_dtypes": dtype,
        "output_sizes": [_output_shape(word, shape, event.group.key.size)],
        "output_dtypes": list(dtype),
        "state": "completed" if _is_done(call) else "started",
        "time_discovered_started_ns": event.time_ns,
        "time_discovered_completed_ns": None if call.end is None or call.end.error else call.end.time_ns,
        "retired": _is_done(call),
        "timeout_ms": 0,
        "is_p2p": False,
        "thread_id": "",
        "thread_name": "",
        "frames": _frames(event.site),
        "workbench": extra,
    }


def _frames(site: CallSite | None) -> list[Json]:
    return [] if site is None else [{"name": site.function, "filename": site.file, "line": site.line}]


def _output_shape(word: str, shape: list[int], group_size: int) -> list[int]:
    """The shape the analyser expects of the output: it checks numbers of elements."""
    if word in ("all_gather", "_all_gather_base"):
        return [group_size * shape[0], *shape[1:]] if shape else [group_size]
    if word in ("reduce_scatter", "_reduce_scatter_base"):
        return [math.prod(shape) // group_size]
    return list(shape)


def _events(
    world_rank: int, entry: Mapping[str, Json], find: Callable[[str, str], tuple[int, ...]], ordinal: int
) -> list[Event]:
    name, desc = _names(entry)
    _, _, operation = _take(entry, "profiling_name", str).rpartition(":")
    word, _, peers = operation.partition(" ")
    kind = desc if desc not in ("", "undefined") else f"pg{name}"
    generation = int(name.rpartition("@")[2]) if re.fullmatch(r".*\]@\d{1,6}", name) else 0
    extra = entry.get("workbench")
    said: Mapping[str, Json] = extra if isinstance(extra, dict) else {}
    label, number = said.get("label", kind), said.get("ordinal", entry.get("pg_id"))
    group = GroupInfo(
        GroupKey(kind, find(name, desc)),
        label if isinstance(label, str) else kind,
        number if isinstance(number, int) else 0,
        generation,
    )
    shape = _first(entry, "input_sizes")
    dtype = _first(entry, "input_dtypes")
    is_p2p = entry.get("is_p2p") is True
    frames = entry.get("frames")
    begin = Event(
        time_ns=_take(entry, "time_created_ns", int),
        world_rank=world_rank,
        phase=Phase.BEGIN,
        op=str(said.get("op") or word),
        ordinal=ordinal,
        sequence=_take(entry, "p2p_seq_id" if is_p2p else "collective_seq_id", int),
        group=group,
        peer_world_rank=_peer(word, peers, group.world_ranks),
        shape=tuple(shape) if isinstance(shape, list) and all(isinstance(n, int) for n in shape) else None,
        dtype=_DTYPES_BACK.get(dtype, dtype.lower()) or None if isinstance(dtype, str) else None,
        capture=said.get("capture") is True,
        site=_site(frames if isinstance(frames, list) else []),
        root_group_rank=_optional(said, "root_group_rank", int),
        root_world_rank=_optional(said, "root_world_rank", int),
        reduce_op=_optional(said, "reduce_op", str),
        stride_class=_optional(said, "stride_class", str),
        path=_optional(said, "path", str),
    )
    done_ns = entry.get("time_discovered_completed_ns")
    if isinstance(done_ns, int) and done_ns > 0:
        return [begin, replace(begin, phase=Phase.END, time_ns=done_ns, ordinal=ordinal + 1)]
    if entry.get("state") == "completed" or entry.get("retired") is True:
        note = "finished at a time the dump does not say"
        return [begin, replace(begin, phase=Phase.END, ordinal=ordinal + 1, note=note)]
    return [begin]


def _peer(word: str, peers: str, members: tuple[int, ...]) -> int | None:
    """The other side of "send 1->2" or "recv 2<-1", whose numbers are torch's ranks in the group."""
    match = re.fullmatch(r"(\d{1,9})(?:->|<-)(\d{1,9})", peers) if word in ("send", "recv") else None
    if match is None:
        return None
    number = int(match[2])
    return sorted(members)[number] if number < len(members) else None


def _site(frames: Sequence[Json]) -> CallSite | None:
    """The innermost frame outside torch, else the innermost."""
    sites = []
    for frame in frames:
        if isinstance(frame, dict) and isinstance(frame.get("name"), str) and isinstance(frame.get("filename"), str):
            line = frame.get("line")
            sites.append(CallSite(frame["name"], frame["filename"], line if isinstance(line, int) else 0))
    return next((s for s in sites if "/torch/" not in s.file), sites[0] if sites else None)


def _group_table(dump: Mapping[str, Json]) -> dict[str, tuple[int, ...]]:
    """Group name -> members, where the dump has them: torch writes the list as text."""
    table = {}
    config = dump.get("pg_config")
    for name, entry in config.items() if isinstance(config, dict) else ():
        text = entry.get("ranks") if isinstance(entry, dict) else None
        if (
            isinstance(name, str)
            and isinstance(text, str)
            and re.fullmatch(r"\[\s*\d{1,9}(\s*,\s*\d{1,9})*\s*\]", text)
        ):
            table[name] = tuple(json.loads(text))
    return table


def _entries(dump: Mapping[str, Json]) -> list[Mapping[str, Json]]:
    entries = dump.get("entries")
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise TraceError("a dump's entries are not a list of objects")
    return entries


def _names(entry: Mapping[str, Json]) -> tuple[str, str]:
    group = entry.get("process_group")
    if not isinstance(group, list | tuple) or len(group) != 2 or not all(isinstance(n, str) for n in group):
        raise TraceError(f"an entry's process_group is {_show(group)}, not a name and a description")
    return group[0], group[1]


def _take(entry: Mapping[str, Json], name: str, kind: type[T]) -> T:
    value = entry.get(name)
    if not isinstance(value, kind):
        raise TraceError(f"an entry's {name} is {_show(value)}, not {kind.__name__}")
    return value


def _optional(said: Mapping[str, Json], name: str, kind: type[T]) -> T | None:
    value = said.get(name)
    return value if isinstance(value, kind) else None


def _first(entry: Mapping[str, Json], name: str) -> Json:
    value = entry.get(name)
    return value[0] if isinstance(value, list) and value else None


def _show(value: Json) -> str:
    """A value for a message. Containers by type only: printing what a stranger wrote may take forever."""
    return f"{value!r:.60}" if value is None or isinstance(value, str | int | float) else type(value).__name__
