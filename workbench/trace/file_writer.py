"""TraceFile: the bytes of one rank's trace, written so that another process can read them at any time.

What does not fit is counted and left out; nothing here raises into the caller's program once the file is open.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable
from itertools import count
from tempfile import gettempdir
from typing import Any

from workbench.trace import layout as at
from workbench.trace.lost_pages import forget_mapping, survive_lost_pages

Writer = Callable[..., None]
"""Writes one record: the call's sequence number, its packed HEAD, a note or error, and its time if that is not now."""


class TraceFile:
    """The mapped file: a ring of records, and a table in which each text, shape, group and call site is kept once."""

    def __init__(self, fd: int, meta: dict[str, Any], size_bytes: int, clock: Callable[[], int]) -> None:
        self.live = True
        self.layout = at.Layout.of_size(size_bytes)
        os.posix_fallocate(fd, 0, size_bytes)
        self._map = mmap.mmap(fd, size_bytes)
        self._words: memoryview[int] = memoryview(self._map)[self.layout.words_at : self.layout.table_at].cast("Q")
        self.clock = clock
        self._numbers = count()
        self._writers: dict[int, Writer] = {}
        self._ids: dict[str, int] = {}
        self._used = 0
        self._lock = threading.Lock()
        self._adding = 0
        self.inner_files = _inner_files()
        self._world_rank = meta["world_rank"]
        survive_lost_pages(self._map, self._lose)
        self._write_header(meta)
        _OPEN.add(self)

    def writer(self, slot: int) -> Writer:
        """The function that writes records and counts them in this slot: the same one each time it is asked for."""
        if slot in self._writers:
            return self._writers[slot]
        # Twice a call, often after the thread slept and nothing is in a cache: what it needs is in its own cells.
        mapped, words, numbers, events = self._map, self._words, self._numbers, count(1)
        word, ring_at, places = at.WORD_SLOTS + slot, self.layout.ring_at, self.layout.places

        def write(sequence: int, head: bytes, text: str, time_ns: int = 0) -> None:
            """One record, and the note or error behind it."""
            if not self.live:
                return
            if text:
                head = at.with_flag(head, at.FLAG_TEXT)
            number = next(numbers)
            mark = number + 1
            try:
                _pack_into(mapped, ring_at + number % places * 80, mark, time_ns or self.clock(), sequence, head, mark)
                words[word] = next(events)
                if text:
                    self._write_text(number, text)
            except ValueError:  # closed by another thread just now
                pass

        self._writers[slot] = write
        return write

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
        forget_mapping(self._map)
        try:
            self._words.release()
            self._map.close()
        except BufferError:  # another thread is inside a write: freed with this object
            pass

    def _lose(self) -> None:
        """The file was cut, or its disk failed. Called in the middle of a write: see lost_pages."""
        self.live = False
        told = f"workbench: world rank {self._world_rank} is not recorded any more: its trace file was cut or failed\n"
        with contextlib.suppress(OSError):
            os.write(2, told.encode())

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
            place = self.layout.ring_at + number % self.layout.places * at.RECORD.size
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


_OPEN: weakref.WeakSet[TraceFile] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_in_child)

_pack_into = at.EVENT.pack_into


def _inner_files() -> tuple[str, ...]:
    """Starts of file names whose frames are not "the caller": the rooms a call passes through, torch if it is loaded,
    and the code that torch's compiler made of a program's.

    Programs of this package (demo, models, measure) are callers like any other.
    """
    package = os.path.dirname(os.path.dirname(__file__))
    folders = [os.path.join(package, room) for room in ("trace", "runtime", "backends", "launch", "observe", "ops")]
    torch_file = getattr(sys.modules.get("torch"), "__file__", None)
    if torch_file:
        folders.append(os.path.dirname(torch_file))
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.path.join(gettempdir(), "torchinductor_")
    return (*(folder + os.sep for folder in folders), contextlib.__file__, "<frozen ", "<eval_with_key>", inductor)
