"""Recorder: one rank's events, in a mapped file that another process can read at any time, even after SIGKILL.

Recording never raises into the caller's program: what does not fit is counted and left out. Environment values, command
lines and tensor contents are never written.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import Any

from workbench.errors import ArgumentError
from workbench.ranks import GroupKey
from workbench.trace import layout as at
from workbench.trace.event import CallSite, GroupInfo
from workbench.trace.file_writer import TraceFile
from workbench.trace.lane_writer import Lane, Token
from workbench.version import VERSION

SIZE_BYTES = 8 << 20
"""Default size of a rank's file: about 39,000 calls, begin and end."""


class Recorder:
    """One rank's trace file. Threads may record at the same time; a forked child records nothing.

    The file is `rank-00003.wbtrace` in `directory`, mode 0600; a later process of the same rank (a restart) gets
    `rank-00003.1.wbtrace` and so on. Its space is reserved at once, so a full disk is an OSError here and nowhere else.
    On a disk the kernel may now and then hold a write back for milliseconds; a directory in memory avoids that.
    """

    def __init__(self, path: Path | None, world_rank: int, file: TraceFile | None) -> None:
        """Use Recorder.open or Recorder.off."""
        self.path = path
        self.world_rank = world_rank
        self._file = file
        self._lanes: dict[tuple[GroupKey, str, int, int], Lane] = {}
        self._lock = threading.Lock()
        self._lane = Lane(file, None)
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
            return cls(path, world_rank, TraceFile(fd, meta, size_bytes, monotonic_ns))
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
        borrowed._is_borrowed = True
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
            return Lane(None, info)
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

    def end(self, token: Token | None, *, note: str = "", error: str = "", time_ns: int = 0) -> None:
        """Record the end of what `begin` started: see Lane.end."""
        self._lane.end(token, note, error, time_ns)

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
        return Lane(self._file, info, slot=slot, group_id=self._file.add({"group": info.to_json(), "slot": slot}))


_shared: Recorder | None = None


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
