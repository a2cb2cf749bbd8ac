"""Reads trace files: of a live rank, of one that hangs, of one that was killed. Trusts nothing it finds in them."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from workbench.ranks import GroupKey
from workbench.trace import layout as at
from workbench.trace.event import CallSite, Event, GroupInfo, Json, Phase, TraceError
from workbench.trace.records import Drops, Header, RankTrace, Trace, align


def read_rank(path: str | os.PathLike[str]) -> RankTrace:
    """Read one rank's file, whether its writer lives, hangs or is gone. Local; takes no lock.

    A record that was cut short is passed over and counted.
    Raises: TraceError for a file that is not a whole trace file, naming it and what was found; OSError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return _read(fd)
    except TraceError as e:
        raise TraceError(f"{os.fspath(path)}: {e}") from None
    finally:
        os.close(fd)


def read_directory(
    *directories: str | os.PathLike[str],
    attempt: int | None = None,
    complete: Callable[[RankTrace], RankTrace] | None = None,
) -> Trace:
    """Read the files of all ranks in these directories (one a node), and set them on one clock.

    `attempt` picks a restart; the latest by default. A file that cannot be read is listed in `unreadable`. `complete`
    may add to a rank what is known of it from elsewhere, before the clocks are set.
    Raises: TraceError when there is no readable file, or none of that attempt.
    """
    with _collection_paused():
        return _read_directory(directories, attempt, complete)


def read_progress(path: str | os.PathLike[str]) -> int:
    """How many events a rank has recorded so far: a cheap look at whether anything moves. Raises as read_rank."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        layout, _ = _read_header(fd)
        return sum(_words(fd, layout)[at.WORD_SLOTS :])
    except TraceError as e:
        raise TraceError(f"{os.fspath(path)}: {e}") from None
    finally:
        os.close(fd)


def _read_directory(
    directories: tuple[str | os.PathLike[str], ...],
    attempt: int | None,
    complete: Callable[[RankTrace], RankTrace] | None,
) -> Trace:
    ranks: dict[tuple[int, int], RankTrace] = {}
    unreadable: list[tuple[str, str]] = []
    for path in sorted(p for d in directories for p in Path(d).glob("*.wbtrace")):
        try:
            found = read_rank(path)
        except (TraceError, OSError) as e:
            unreadable.append((str(path), str(e)))
            continue
        name = (found.header.attempt, found.world_rank)
        if name in ranks:
            unreadable.append((str(path), f"{path}: another file holds world rank {name[1]} of attempt {name[0]} too"))
        else:
            ranks[name] = found
    where = ", ".join(os.fspath(d) for d in directories)
    if not ranks:
        raise TraceError(f"no trace in {where}: {'; '.join(t for _, t in unreadable) or 'no file *.wbtrace found'}")
    attempts = tuple(sorted({a for a, _ in ranks}))
    wanted = attempts[-1] if attempt is None else attempt
    if wanted not in attempts:
        raise TraceError(f"no trace of attempt {wanted} in {where}; found attempts {', '.join(map(str, attempts))}")
    chosen = [r if complete is None else complete(r) for (a, _), r in ranks.items() if a == wanted]
    return align(chosen, attempts=attempts, unreadable=tuple(unreadable))


@contextlib.contextmanager
def _collection_paused() -> Iterator[None]:
    """Events hold no cycles, and a million of them would be looked through again and again as they are made."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _read(fd: int) -> RankTrace:
    layout, meta = _read_header(fd)
    counts = _words(fd, layout)
    ring = _bytes(fd, layout.ring_at, layout.places * at.RECORD.size)
    again = _bytes(fd, layout.ring_at, layout.places * at.RECORD.size)
    words = _words(fd, layout)  # after the ring: what its records name is in the table by now
    table = _Table(_bytes(fd, layout.table_at, min(words[at.WORD_TABLE_USED], layout.table_bytes)))
    records, damaged = _records(ring, again, layout.places)
    texts = _texts(records)
    events = []
    for number, time_ns, sequence, head in records:
        if head[0] != at.PHASE_TEXT:
            try:
                events.append(table.event(meta["world_rank"], number, time_ns, sequence, head, texts.get(number, "")))
            except TraceError:
                damaged += 1
    return RankTrace(
        header=_header(meta, words[at.WORD_CLOSED_NS] or None),
        events=tuple(events),
        drops=_drops(events, table, counts, layout, words[at.WORD_TABLE_LOST], damaged),
        groups=tuple(table.slots),
        declared=tuple(table.declared),
    )


def _read_header(fd: int) -> tuple[at.Layout, Mapping[str, Json]]:
    """The layout and the header's JSON. Every size is checked against the file before anything else is read."""
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        raise TraceError("not a regular file")
    if info.st_size < at.HEADER_BYTES:
        raise TraceError(f"{info.st_size} bytes long, a trace file has a header of {at.HEADER_BYTES}")
    head = _bytes(fd, 0, at.HEADER_BYTES)
    magic, record_bytes, meta_bytes, *sizes = at.PREFIX.unpack_from(head)
    if magic != at.MAGIC:
        raise TraceError(f"starts with {magic!r}, a trace file with {at.MAGIC!r} (or its rank died while making it)")
    layout = at.Layout(*sizes)
    known = at.MIN_FILE_BYTES <= layout.file_bytes <= at.MAX_FILE_BYTES and layout == at.Layout.of_size(
        layout.file_bytes
    )
    if not known or record_bytes != at.RECORD.size:
        raise TraceError(
            f"its header declares a layout this version does not write: {layout}, records of {record_bytes}"
        )
    if info.st_size < layout.file_bytes:
        raise TraceError(f"{info.st_size} bytes long, its header declares {layout.file_bytes}: the file was cut")
    meta = _json(head[at.PREFIX.size :][:meta_bytes])
    if not isinstance(meta, dict) or not isinstance(meta.get("world_rank"), int):
        raise TraceError(f"its header's text is not what a recorder writes: {meta!r:.80}")
    return layout, meta


def _header(meta: Mapping[str, Json], closed_ns: int | None) -> Header:
    def take(name: str, kind: type[T], default: T) -> T:
        value = meta.get(name, default)
        if not isinstance(value, kind):
            raise TraceError(f"its header's {name} is {value!r:.80}, not {kind.__name__}")
        return value

    return Header(
        world_rank=take("world_rank", int, 0),
        attempt=take("attempt", int, 0),
        host=take("host", str, ""),
        boot_id=take("boot_id", str, ""),
        pid=take("pid", int, 0),
        anchor_monotonic_ns=take("anchor_monotonic_ns", int, 0),
        anchor_wall_ns=take("anchor_wall_ns", int, 0),
        versions=tuple((str(k), str(v)) for k, v in take("versions", dict, {}).items()),
        closed_ns=closed_ns,
    )


T = TypeVar("T")
_Record = tuple[int, int, int, bytes]  # number, time_ns, sequence, head


def _records(ring: bytes, again: bytes, places: int) -> tuple[list[_Record], int]:
    """Whole records in order, and how many are damaged. A record that changed between two reads is left for later."""
    records: list[_Record] = []
    damaged = 0
    same = ring == again
    size = at.EVENT.size
    used = -(-len(ring.rstrip(b"\0")) // size)  # of a young ring, the rest was never written
    for place, (first, time_ns, sequence, head, last) in enumerate(at.EVENT.iter_unpack(ring[: used * size])):
        if not same and ring[place * size : place * size + size] != again[place * size : place * size + size]:
            continue
        if first == last == 0:
            continue
        if first != last or (first - 1) % places != place:
            damaged += 1
            continue
        records.append((first - 1, time_ns, sequence, head))
    records.sort()
    return records, damaged


def _texts(records: Iterable[_Record]) -> dict[int, str]:
    """Notes and errors by the number of their event. A text whose end is not there closes with three dots."""
    parts: dict[int, dict[int, bytes]] = {}
    whole: set[int] = set()
    for _, event, part, head in records:
        if head[0] == at.PHASE_TEXT:
            _, flags, length, piece = at.HEAD.unpack(head)
            parts.setdefault(event, {})[part] = piece[: min(length, at.TEXT_BYTES)]
            if flags & at.FLAG_LAST_PART:
                whole.add(event)
    texts = {}
    for event, pieces in parts.items():
        in_order = sorted(pieces)
        text = b"".join(pieces[n] for n in in_order).decode(errors="replace")
        missing = event not in whole or in_order != list(range(len(in_order)))
        texts[event] = f"{text}..." if missing else text
    return texts


def _drops(
    events: list[Event], table: _Table, counts: memoryview[int], layout: at.Layout, table_lost: int, damaged: int
) -> Drops:
    """Events counted by the writer, less those that are here."""
    last = layout.num_slots - 1
    groups = {id(e.group): e.group for e in events}  # few objects, which are slow to hash
    present: Counter[int] = Counter()
    for which, num in Counter(id(e.group) for e in events).items():
        group = groups[which]
        present[0 if group is None else table.slots.get(group, last)] += num

    def gone(slot: int) -> int:
        return max(counts[at.WORD_SLOTS + slot] - present[slot], 0)

    by_group: list[tuple[GroupInfo | None, int]] = [(g, gone(s)) for g, s in table.slots.items() if 0 < s < last]
    by_group.append((None, gone(0) + gone(last)))
    by_group = [(g, n) for g, n in by_group if n]
    total = sum(n for _, n in by_group)
    return Drops(total=total, by_group=tuple(by_group), table_lost=table_lost, damaged=damaged)


class _Table:
    """The interned values by id. A line that makes no sense costs the events that name it, not the file."""

    def __init__(self, data: bytes) -> None:
        self.slots: dict[GroupInfo, int] = {}
        self.declared: list[str] = []
        self._values: list[Any] = []
        self._known: dict[bytes, Event] = {}
        for line in data.split(b"\n")[:-1]:
            self._values.append(self._value(line))

    def event(self, world_rank: int, number: int, time_ns: int, sequence: int, head: bytes, text: str) -> Event:
        """Raises TraceError for a record whose ids or phase are not those of a recorder."""
        first = self._known.get(head)
        if first is None:
            first = self._known[head] = self._first(world_rank, head)
        if not text:
            return first.repeated(time_ns, number, sequence, first.note, "")
        if head[1] & at.FLAG_ERROR:
            return first.repeated(time_ns, number, sequence, first.note, text)
        note = f"{first.note}; {text}" if first.note else text
        return first.repeated(time_ns, number, sequence, note, "")

    def _first(self, world_rank: int, head: bytes) -> Event:
        """What all events with this head have in common; its note is their remark."""
        phase, flags, remark_id, what = at.HEAD.unpack(head)
        if phase not in _PHASES:
            raise TraceError(f"a record has phase {phase}")
        return Event(
            time_ns=0,
            world_rank=world_rank,
            phase=_PHASES[phase],
            capture=bool(flags & at.FLAG_CAPTURE),
            note=self._get(remark_id, str) or "",
            **self._fields(what),
        )

    def _fields(self, what: bytes) -> dict[str, Any]:
        group, op, shape, dtype, path, reduce_op, strides, site, root_group_rank, root_world_rank, peer = (
            at.WHAT.unpack(what)
        )
        return {
            "group": _LOST_GROUP if group == at.ID_LOST else self._get(group, GroupInfo),
            "op": self._get(op, str) or "?",
            "shape": self._get(shape, tuple),
            "dtype": self._get(dtype, str),
            "path": self._get(path, str),
            "reduce_op": self._get(reduce_op, str),
            "stride_class": self._get(strides, str),
            "site": self._get(site, CallSite),
            "root_group_rank": _rank(root_group_rank),
            "root_world_rank": _rank(root_world_rank),
            "peer_world_rank": _rank(peer),
        }

    def _get(self, number: int, kind: type[T]) -> T | None:
        if number in (at.ID_NONE, at.ID_LOST):
            return None
        value = self._values[number - at.ID_FIRST] if number - at.ID_FIRST < len(self._values) else None
        if not isinstance(value, kind):
            raise TraceError(f"id {number} is not a {kind.__name__}")
        return value

    def _value(self, line: bytes) -> Any:
        """A text, a shape, a group, a call site, or None for what is none of them."""
        try:
            value = _json(line)
            if isinstance(value, str):
                return value
            if isinstance(value, list) and all(type(n) is int for n in value):
                return tuple(value)
            if isinstance(value, dict) and isinstance(value.get("declared"), str):
                self.declared.append(value["declared"])
            elif isinstance(value, dict) and isinstance(value.get("group"), dict):
                group = GroupInfo.from_json(value["group"])
                self.slots[group] = value["slot"] if type(value.get("slot")) is int else 0
                return group
            elif isinstance(value, dict) and isinstance(value.get("site"), list):
                site, *callers = (
                    CallSite(str(function), str(file), int(number))
                    for function, file, number in (value["site"], *value.get("callers", ()))
                )
                return replace(site, callers=tuple(callers))
        except (TraceError, ValueError, TypeError):
            pass
        return None


_PHASES = {at.PHASES[p.value]: p for p in Phase}
_LOST_GROUP = GroupInfo(GroupKey("?", ()), "?", 0)


def _rank(value: int) -> int | None:
    return None if value == at.NO_RANK else value


def _json(data: bytes) -> Json:
    """Raises TraceError for what is not JSON, or nested deeper than Python's stack."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as e:
        raise TraceError(f"{data[:60]!r} is not JSON: {type(e).__name__}") from None


def _words(fd: int, layout: at.Layout) -> memoryview[int]:
    return memoryview(_bytes(fd, layout.words_at, layout.table_at - layout.words_at)).cast("Q")


def _bytes(fd: int, start: int, length: int) -> bytes:
    """Read and not mapped: a file that is cut short meanwhile gives an error here; a mapping would kill the process."""
    data = os.pread(fd, length, start)
    if len(data) != length:
        raise TraceError(f"{len(data)} of {length} bytes at {start}: the file was cut while it was read")
    return data
