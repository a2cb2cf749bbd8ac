"""Recorder: writes one rank's events into a mapped file that another process can read at any time, even after SIGKILL.

Recording never raises into the caller's program: what does not fit is counted and left out. Environment values, command
lines and tensor contents are never written.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from workbench.errors import ArgumentError
from workbench.ranks import GroupKey
from workbench.trace import layout as at
from workbench.trace.event import CallSite, GroupInfo
from workbench.version import VERSION

SIZE_BYTES = 8 << 20
"""Default size of a rank's file: about 39,000 calls, begin and end."""

Token = tuple[bytes, int]
"""What begin gives and end takes: the part of the end's record that is known by then, and the sequence number."""

_Known = tuple[bytes, bytes, tuple[str, int] | None, Sequence[CodeType]]
"""A call described before: the heads of its two records, its operation and peer if it has one, and the code objects
whose ids its key holds, kept so that these ids stay taken."""


class Recorder:
    """One rank's trace file. Threads may record at the same time; a forked child records nothing.

    The file is `rank-00003.wbtrace` in `directory`, mode 0600; a later process of the same rank (a restart) gets
    `rank-00003.1.wbtrace` and so on. Its space is reserved at once, so a full disk is an OSError here and nowhere else.
    On a disk the kernel may now and then hold a write back for milliseconds; a directory in memory avoids that.
    """

    def __init__(self, path: Path | None, world_rank: int, file: _File | None) -> None:
        """Use Recorder.open or Recorder.off."""
        self.path = path
        self.world_rank = world_rank
        self._file = file
        self._lanes: dict[tuple[GroupKey, str, int, int], Lane] = {}
        self._lock = threading.Lock()
        self._lane = Lane(file, None, slot=0, group_id=at.ID_NONE)
        self._events_of_the_rest = count(1)  # of the lanes that share the last slot
        self._is_borrowed = False

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        world_rank: int,
        *,
        size_bytes: int = SIZE_BYTES,
        attempt: int | None = None,
        first_attempt: int = 0,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> Recorder:
        """A recorder that writes into `directory`, which is made (mode 0700) if it is not there.

        `attempt` is the restart the process belongs to, equal on all ranks (torchrun counts them); without it, the
        first number from `first_attempt` on that this rank has no file for. Local.
        Raises: ArgumentError for a size or rank that cannot be; FileExistsError if `attempt` has a file; OSError.
        """
        if not at.MIN_FILE_BYTES <= size_bytes <= at.MAX_FILE_BYTES:
            raise ArgumentError(
                f"size_bytes={size_bytes} asked for a trace file; allowed: {at.MIN_FILE_BYTES} to {at.MAX_FILE_BYTES}"
            )
        if world_rank < 0:
            raise ArgumentError(f"world_rank={world_rank} asked for a trace file; allowed: 0 and above")
        folder = Path(directory)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.stat()
        if info.st_uid != os.geteuid() or info.st_mode & 0o022:
            raise ArgumentError(
                f"trace directory {folder} belongs to uid {info.st_uid} with mode {info.st_mode & 0o7777:o}; it must "
                f"be yours and writable by nobody else"
            )
        path, fd, attempt = _create(folder, world_rank, attempt, first_attempt)
        try:
            meta = _meta(world_rank, attempt, monotonic_ns(), wall_ns())
            return cls(path, world_rank, _File(fd, meta, size_bytes, monotonic_ns))
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(fd)

    @staticmethod
    def off() -> Recorder:
        """A recorder with the same face that writes nothing."""
        return Recorder(None, 0, None)

    def share(self) -> None:
        """Make this the recorder of the process: what records without a directory of its own writes into it too."""
        global _shared
        _shared = self

    @staticmethod
    def shared() -> Recorder:
        """The recorder of this process, under a handle whose close does nothing; one that is off if there is none."""
        if _shared is None or not _shared.enabled:
            return Recorder.off()
        borrowed = Recorder(_shared.path, _shared.world_rank, _shared._file)
        borrowed._lanes, borrowed._lock, borrowed._lane = _shared._lanes, _shared._lock, _shared._lane
        borrowed._events_of_the_rest, borrowed._is_borrowed = _shared._events_of_the_rest, True
        return borrowed

    @property
    def enabled(self) -> bool:
        """Whether events are being written: not when off, closed, or in a forked child."""
        return self._file is not None and self._file.live

    @property
    def inner_files(self) -> tuple[str, ...]:
        """Starts of file names whose frames are not the caller's: see CallSite. Empty when off."""
        return self._file.inner_files if self._file is not None else ()

    def group(self, key: GroupKey, *, label: str = "", ordinal: int = 0, generation: int = 0) -> Lane:
        """The lane of one group; the same object for the same arguments. Local.

        `label` is what the program calls the group, `ordinal` its place among the groups this rank created,
        `generation` the rebuild it belongs to: a new generation counts its calls from 1 again.
        """
        wanted = (key, label, ordinal, generation)
        lane = self._lanes.get(wanted)
        if lane is not None:
            return lane
        info = GroupInfo(*wanted)
        if not self.enabled:
            return Lane(None, info, slot=0, group_id=at.ID_NONE)
        with self._lock:
            if wanted not in self._lanes:
                self._lanes[wanted] = self._new_lane(info)
            return self._lanes[wanted]

    def declare(self, document: str) -> None:
        """Keep what the program says about itself, such as its group map as JSON text, beside its events. Local."""
        if self._file is not None:
            self._file.add({"declared": str(document)})

    def instant(
        self, op: str, *, note: str = "", error: str = "", remark: str = "", site: CallSite | None = None
    ) -> None:
        """Record something that belongs to no group, at `site` (default: the caller's line)."""
        self._lane.instant(op, note=note, error=error, remark=remark, site=site)

    def begin(self, op: str, *, path: str | None = None, note: str = "", remark: str = "") -> Token | None:
        """Record the start of something that belongs to no group, such as a wait for a store key."""
        return self._lane.begin(op, path=path, note=note, remark=remark)

    @contextlib.contextmanager
    def at(self, time_ns: int) -> Iterator[None]:
        """Inside the block, record with this time instead: for what happened before the rank was known.

        Units: nanoseconds of the recorder's monotonic clock. For one thread only.
        """
        if self._file is None:
            yield
            return
        clock, self._file.clock = self._file.clock, lambda: time_ns
        try:
            yield
        finally:
            self._file.clock = clock

    def end(self, token: Token | None, *, note: str = "", error: str = "") -> None:
        """Record the end of what `begin` started."""
        self._lane.end(token, note=note, error=error)

    def span(self, op: str, *, path: str | None = None, note: str = "") -> AbstractContextManager[None]:
        """begin and end around a block that belongs to no group; an exception is recorded and goes on."""
        return self._lane.span(op, path=path, note=note)

    def close(self) -> None:
        """Note the end and let the file go. A second call does nothing; a forked child leaves the file as it is."""
        if self._file is not None and not self._is_borrowed:
            self._file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _new_lane(self, info: GroupInfo) -> Lane:
        assert self._file is not None
        slot = min(len(self._lanes) + 1, self._file.layout.num_slots - 1)
        lane = Lane(self._file, info, slot=slot, group_id=self._file.add({"group": info.to_json(), "slot": slot}))
        if slot == self._file.layout.num_slots - 1:
            lane._events = self._events_of_the_rest
        return lane


class Lane:
    """One group's calls on this rank. `begin` and `end` together cost a few microseconds."""

    def __init__(self, file: _File | None, info: GroupInfo | None, *, slot: int, group_id: int) -> None:
        """Use Recorder.group."""
        self.info = info
        self._file = file
        self._group_id = group_id
        self._word = at.WORD_SLOTS + slot
        self._known: dict[Any, _Known] = {}
        self._events = count(1)
        self._calls = count(1)
        self._latest = 0
        self._peer_calls: dict[tuple[str, int], Iterator[int]] = {}

    def begin(
        self,
        op: str,
        *,
        shape: tuple[int, ...] | None = None,
        dtype: str | None = None,
        path: str | None = None,
        reduce_op: str | None = None,
        root_group_rank: int | None = None,
        root_world_rank: int | None = None,
        peer_world_rank: int | None = None,
        stride_class: str | None = None,
        capture: bool = False,
        note: str = "",
        remark: str = "",
    ) -> Token | None:
        """Record that this rank enters a call, and give what `end` needs.

        One root number is enough: the other follows from the group. Give both to record what a program passed.
        A call with `peer_world_rank` (send, recv) is counted per operation and peer, and not in the group's sequence.
        `remark` opens the note of both events; it is for words that many calls share, and costs nothing a call.
        Shapes: `shape` and `dtype` are the input tensor's; stride_class() gives `stride_class`.
        """
        file = self._file
        if file is None or not file.live:
            return None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(file.inner_files):
            frame = frame.f_back
        key = (
            *(op, shape, dtype, path, reduce_op, root_group_rank, root_world_rank, peer_world_rank, stride_class),
            *((remark, capture, id(frame.f_code), frame.f_lasti) if frame is not None else (remark, capture)),
        )
        try:
            known = self._known[key]
        except (KeyError, TypeError):
            known = self._describe(key, key, frame)
        head, end_head, peer, _ = known
        if peer is None:
            sequence = self._latest = next(self._calls)
        else:
            sequence = next(self._peer_calls.setdefault(peer, count(1)))
        file.write(self._word, next(self._events), sequence, head, note)
        return end_head, sequence

    def begin_known(
        self,
        key: tuple[Any, ...],
        frame: FrameType | None,
        describe: Callable[..., Mapping[str, Any]],
        *args: Any,
        note: str = "",
    ) -> Token | None:
        """begin, for a caller that counts microseconds: describe(key, *args) gives begin's fields, once a key and line.

        key: whatever the fields depend on, and the instruction of `frame`, where to look for the caller. A key that
        cannot be hashed is described afresh.
        """
        file = self._file
        if file is None or not file.live:
            return None
        try:
            head, end_head, peer, _ = self._known[key]
        except (KeyError, TypeError):
            head, end_head, peer, _ = self._meet(file, key, frame, describe, args)
        if peer is None:
            sequence = self._latest = next(self._calls)
        else:
            sequence = next(self._peer_calls.setdefault(peer, count(1)))
        file.write(self._word, next(self._events), sequence, head, note)
        return end_head, sequence

    def end(self, token: Token | None, *, note: str = "", error: str = "") -> None:
        """Record that this rank leaves the call that gave `token`; `error` is the text of what it raised."""
        file = self._file
        if file is None or token is None or not file.live:
            return
        head, sequence = token
        if error:
            head = _flagged(head, at.FLAG_ERROR)
        file.write(self._word, next(self._events), sequence, head, error or note)

    def instant(
        self,
        op: str,
        *,
        path: str | None = None,
        note: str = "",
        error: str = "",
        remark: str = "",
        site: CallSite | None = None,
    ) -> None:
        """Record something that has no length: a plan, a fallback, a state change."""
        file = self._file
        if file is None or not file.live:
            return
        frame: FrameType | None = None if site is not None else sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(file.inner_files):
            frame = frame.f_back
        key = (
            *(op, None, None, path, None, None, None, None, None),
            *((remark, False, id(frame.f_code), frame.f_lasti) if frame is not None else (remark, False, site)),
        )
        try:
            known = self._known[key]
        except (KeyError, TypeError):
            known = self._describe(key, key, frame, where=site)
        head = _of_phase(known[0], at.PHASES["I"])
        if error:
            head = _flagged(head, at.FLAG_ERROR)
        file.write(self._word, next(self._events), self._latest, head, error or note)

    @contextlib.contextmanager
    def span(self, op: str, **fields: Any) -> Iterator[None]:
        """begin and end around a block; an exception is recorded and goes on. `fields` are those of begin."""
        token = self.begin(op, **fields)
        try:
            yield
        except BaseException as e:
            self.end(token, error=f"{type(e).__name__}: {e}")
            raise
        self.end(token)

    def _meet(
        self,
        file: _File,
        key: tuple[Any, ...],
        frame: FrameType | None,
        describe: Callable[..., Mapping[str, Any]],
        args: tuple[Any, ...],
    ) -> _Known:
        """What begin_known does not know yet. Where `frame` is an inner one, the caller's line belongs to the key."""
        codes = [] if frame is None else [frame.f_code]
        called, line = key, frame
        while line is not None and line.f_code.co_filename.startswith(file.inner_files):
            line = line.f_back
        if line is not None and line is not frame:
            codes.append(line.f_code)
            key = (*key, id(line.f_code), line.f_lasti)
            with contextlib.suppress(KeyError, TypeError):
                return self._known[key]
        fields = describe(called, *args)
        return self._describe(key, [fields.get(name) for name in _DESCRIBED], line, codes=codes)

    def _describe(
        self,
        key: tuple[Any, ...],
        fields: Sequence[Any],
        frame: FrameType | None,
        *,
        where: CallSite | None = None,
        codes: Sequence[CodeType] = (),
    ) -> _Known:
        """The parts of a call's records that repeat from call to call. `fields` begin with _DESCRIBED."""
        assert self._file is not None
        op, shape, dtype, path, reduce_op, root_group_rank, root_world_rank, peer, strides, remark, capture, *_ = fields
        if self.info is not None and root_world_rank is None and root_group_rank is not None:
            root_world_rank = _at(self.info.world_ranks, root_group_rank)
        elif self.info is not None and root_group_rank is None and root_world_rank in self.info.world_ranks:
            root_group_rank = self.info.world_ranks.index(root_world_rank)
        site = None
        if frame is not None:
            site = {"site": [frame.f_code.co_qualname, frame.f_code.co_filename, frame.f_lineno]}
        elif where is not None:
            site = {"site": [where.function, where.file, where.line]}
        add = self._file.add
        what = at.WHAT.pack(
            *(self._group_id, add(str(op)), add(None if shape is None else [_number(n) for n in shape])),
            *(add(_text(dtype)), add(_text(path)), add(_text(reduce_op)), add(_text(strides)), add(site)),
            *(_rank(root_group_rank), _rank(root_world_rank), _rank(peer)),
        )
        remark_id = add(str(remark)) if remark else 0
        if remark_id > at.MAX_REMARK_ID:
            remark_id = at.ID_LOST
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        head = at.HEAD.pack(at.PHASES["B"], at.FLAG_CAPTURE if capture else 0, remark_id, what)
        codes = codes or (() if frame is None else (frame.f_code,))
        known = head, _of_phase(head, at.PHASES["E"]), None if peer is None else (op, peer), codes
        with contextlib.suppress(TypeError):  # a list for a shape: described afresh each time
            self._known[key] = known
        return known


class _File:
    """The mapped file: a ring of records, and a table in which each text, shape, group and call site is kept once."""

    def __init__(self, fd: int, meta: dict[str, Any], size_bytes: int, clock: Callable[[], int]) -> None:
        self.live = True
        self.layout = at.Layout.of_size(size_bytes)
        os.posix_fallocate(fd, 0, size_bytes)
        self._map = mmap.mmap(fd, size_bytes)
        self._words: memoryview[int] = memoryview(self._map)[self.layout.words_at : self.layout.table_at].cast("Q")
        self.clock = clock
        self._places, self._ring_at = self.layout.places, self.layout.ring_at
        self._numbers = count()
        self._ids: dict[str, int] = {}
        self._used = 0
        self._lock = threading.Lock()
        self._adding = 0
        self.inner_files = _inner_files()
        self._write_header(meta)
        _OPEN.add(self)

    def write(self, word: int, events: int, sequence: int, head: bytes, text: str = "") -> None:
        """One record, and the note or error behind it."""
        number = next(self._numbers)
        mark = number + 1
        if text:
            head = _flagged(head, at.FLAG_TEXT)
        try:
            place = self._ring_at + number % self._places * 80
            _pack_into(self._map, place, mark, self.clock(), sequence, head, mark)
            self._words[word] = events
            if text:
                self._write_text(number, text)
        except ValueError:  # closed by another thread just now
            pass

    def add(self, value: Any) -> int:
        """The id of a JSON value, written to the table when it is new. ID_LOST where there is no room left."""
        if value is None:
            return at.ID_NONE
        text = json.dumps(value, separators=(",", ":"))
        known = self._ids.get(text)
        if known is not None:
            return known
        if self._adding == threading.get_ident():  # a signal handler that records, in the middle of this very function
            return at.ID_LOST
        with self._lock:
            self._adding = threading.get_ident()
            try:
                known = self._ids.get(text)
                return self._append(text, value) if known is None else known
            except ValueError:  # closed by another thread just now
                return at.ID_LOST
            finally:
                self._adding = 0

    def close(self) -> None:
        if self.live:
            self.live = False
            self._words[at.WORD_CLOSED_NS] = self.clock()
        self.drop()

    def drop(self) -> None:
        """Stop writing and let the memory go, without touching the file."""
        self.live = False
        _OPEN.discard(self)
        try:
            self._words.release()
            self._map.close()
        except BufferError:  # another thread is inside a write: freed with this object
            pass

    def _append(self, text: str, value: Any) -> int:
        if not self.live:
            return at.ID_LOST
        line = text.encode() + b"\n"
        is_group = isinstance(value, dict) and "group" in value
        room = self.layout.table_bytes * (4 if is_group else 3) // 4  # groups must not be lost to a flood of shapes
        if self._used + len(line) > room:
            self._words[at.WORD_TABLE_LOST] += 1
            return at.ID_LOST
        start = self.layout.table_at + self._used
        self._map[start : start + len(line)] = line
        self._used += len(line)
        self._words[at.WORD_TABLE_USED] = self._used
        self._ids[text] = at.ID_FIRST + len(self._ids)
        return self._ids[text]

    def _write_text(self, event: int, text: str) -> None:
        data = str(text).encode(errors="backslashreplace")
        if len(data) > at.MAX_TEXT_BYTES:
            tail = f"... ({len(data)} bytes)".encode()
            data = data[: at.MAX_TEXT_BYTES - len(tail)].decode(errors="ignore").encode() + tail
        for part, start in enumerate(range(0, len(data), at.TEXT_BYTES)):
            piece = data[start : start + at.TEXT_BYTES]
            number = next(self._numbers)
            place = self._ring_at + number % self._places * at.RECORD.size
            flags = at.FLAG_LAST_PART if start + len(piece) == len(data) else 0
            head = at.HEAD.pack(at.PHASE_TEXT, flags, len(piece), piece)
            _pack_into(self._map, place, number + 1, event, part, head, number + 1)

    def _write_header(self, meta: dict[str, Any]) -> None:
        text, where = json.dumps(meta).encode(), self.layout
        prefix = at.PREFIX.pack(
            *(at.MAGIC, at.RECORD.size, len(text), where.file_bytes, where.words_at, where.table_at),
            *(where.table_bytes, where.ring_at, where.places),
        )
        assert len(prefix) + len(text) <= at.HEADER_BYTES, f"{len(text)} bytes of header text"
        self._map[: len(prefix) + len(text)] = prefix + text


def _forget_in_child() -> None:
    """After fork the child shares the parent's file: it must not write into it."""
    for file in list(_OPEN):
        file.drop()


_shared: Recorder | None = None
_OPEN: weakref.WeakSet[_File] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_in_child)

_DESCRIBED = (
    *("op", "shape", "dtype", "path", "reduce_op", "root_group_rank", "root_world_rank"),
    *("peer_world_rank", "stride_class", "remark", "capture"),
)  # the fields that _describe takes, in its order
_MOST_KNOWN = 4096  # descriptions a lane keeps before it starts afresh
_pack_into = at.EVENT.pack_into


def _of_phase(head: bytes, phase: int) -> bytes:
    return bytes((phase,)) + head[1:]


def _flagged(head: bytes, flag: int) -> bytes:
    return bytes((head[0], head[1] | flag)) + head[2:]


def _inner_files() -> tuple[str, ...]:
    """Starts of file names whose frames are not "the caller": the rooms a call passes through, torch if it is loaded.

    Programs of this package (demo, models, measure) are callers like any other.
    """
    package = os.path.dirname(os.path.dirname(__file__))
    folders = [os.path.join(package, room) for room in ("trace", "runtime", "backends", "launch", "observe", "ops")]
    torch_file = getattr(sys.modules.get("torch"), "__file__", None)
    if torch_file:
        folders.append(os.path.dirname(torch_file))
    return (*(folder + os.sep for folder in folders), contextlib.__file__, "<frozen ")


def _create(folder: Path, world_rank: int, attempt: int | None, first: int) -> tuple[Path, int, int]:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    for number in count(first) if attempt is None else (attempt,):
        path = folder / f"rank-{world_rank:05d}{f'.{number}' if number else ''}.wbtrace"
        try:
            return path, os.open(path, flags, 0o600), number
        except FileExistsError:
            if attempt is not None:
                raise
    raise AssertionError("unreachable")


def _meta(world_rank: int, attempt: int, monotonic_ns: int, wall_ns: int) -> dict[str, Any]:
    torch_version = getattr(sys.modules.get("torch"), "__version__", "")
    return {
        "world_rank": world_rank,
        "attempt": attempt,
        "host": socket.gethostname(),
        "boot_id": _boot_id(),
        "pid": os.getpid(),
        "anchor_monotonic_ns": monotonic_ns,
        "anchor_wall_ns": wall_ns,
        "versions": {"workbench": VERSION, "python": sys.version.split()[0], "torch": str(torch_version)},
    }


def _boot_id() -> str:
    """The kernel's name for this boot: equal on all processes that share one monotonic clock. "" where hidden."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _at(ranks: tuple[int, ...], place: Any) -> int | None:
    return ranks[place] if isinstance(place, int) and 0 <= place < len(ranks) else None


def _rank(value: Any) -> int:
    return value if isinstance(value, int) and -(1 << 31) < value < (1 << 31) else at.NO_RANK


def _number(value: Any) -> int:
    """A dim as a plain int; -1 for a size that is only a symbol while torch compiles."""
    return value if type(value) is int else -1


def _text(value: Any) -> str | None:
    return value if value is None else str(value)
