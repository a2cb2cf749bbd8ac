"""Shared-memory segments: create, map, verify, and remove what dead owners left behind.

A segment is a file wbk-<pid>-<starttime>-<random> in /dev/shm, mode 0600. Its owner holds a lock on it for life and
unlinks the name as soon as every member has mapped it. So a name that can be seen belongs to a start-up in progress, or
to a process that died during one: then the lock is free and the process is gone, and `sweep_segments` removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from workbench.errors import ResourceError

SEGMENT_DIRECTORY = "/dev/shm"
_NAME = re.compile(r"wbk-(\d{1,10})-(\d{1,20})-[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """One name of ours found in the directory. `alive`: its owner still lives, or somebody holds its lock."""

    name: str
    size_bytes: int
    owner_pid: int
    alive: bool


class Segment:
    """A mapped segment. The memory stays mapped as long as this object or anything over `memory` lives."""

    def __init__(self, name: str, fd: int, size_bytes: int) -> None:
        self.name = name
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # page faults now, not in the first calls
        self.memory = mmap.mmap(fd, size_bytes, flags, mmap.PROT_READ | mmap.PROT_WRITE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


class OwnSegment(Segment):
    """A segment this process created: zeroed memory, all of it really there, and the lock that says we live."""

    def __init__(self, size_bytes: int) -> None:
        """Raises ResourceError with needed and free bytes if the directory is full or cannot be written."""
        name = f"wbk-{os.getpid()}-{start_time_of(os.getpid())}-{secrets.token_hex(8)}"
        try:
            fd = os.open(_path(name), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as e:
            raise ResourceError(f"no segment in {SEGMENT_DIRECTORY}: {e}; it must be a writable tmpfs") from e
        self._fd = fd
        self._named = True
        self.name = name
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # waits only while a sweep in another process tries the lock
            os.posix_fallocate(fd, 0, size_bytes)  # a full directory is an error here, never a SIGBUS later
            super().__init__(name, fd, size_bytes)
        except OSError as e:
            free = free_bytes()
            self.close()
            raise ResourceError(
                f"{SEGMENT_DIRECTORY} cannot hold a segment: needed {size_bytes} bytes, free {free} bytes "
                f"({e.strerror}); enlarge it, prepare fewer tokens, or run `workbench clean`"
            ) from e
        except BaseException:
            self.close()
            raise

    def unlink(self) -> None:
        """Take the name away, unless somebody did. What is mapped stays."""
        if self._named:
            self._named = False
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_path(self.name))

    def close(self) -> None:
        """Give up the name. Memory and lock go with the last tensor over it. May be called twice."""
        self.unlink()
        if self._fd >= 0:
            fd, self._fd = self._fd, -1  # first: closed twice, the number may be somebody else's by then
            os.close(fd)


def map_segment(name: str, size_bytes: int) -> Segment:
    """Map a peer's segment after checking that it is what the peer said.

    Raises: ResourceError if it is missing, a link, another user's, open to others, or of another size.
    """
    if _NAME.fullmatch(name) is None:
        raise ResourceError(f"{name!r} is not a segment's name")
    try:
        fd = os.open(_path(name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as e:
        raise ResourceError(f"segment {name} cannot be opened: {e.strerror}") from e
    try:
        info = os.fstat(fd)
        if (
            not stat.S_ISREG(info.st_mode)
            or info.st_uid != os.geteuid()
            or stat.S_IMODE(info.st_mode) != 0o600
            or info.st_size != size_bytes
        ):
            raise ResourceError(
                f"segment {name} is not used: uid {info.st_uid}, mode {stat.filemode(info.st_mode)}, "
                f"{info.st_size} bytes; expected uid {os.geteuid()}, mode -rw-------, {size_bytes} bytes"
            )
        return Segment(name, fd, size_bytes)
    finally:
        os.close(fd)


def list_segments() -> tuple[SegmentFile, ...]:
    """Our user's segments that still have a name, sorted. Local; changes nothing."""
    found = []
    for name in sorted(os.listdir(SEGMENT_DIRECTORY)) if os.path.isdir(SEGMENT_DIRECTORY) else ():
        match = _NAME.fullmatch(name)
        info = _own_file(name) if match else None
        if match is None or info is None:
            continue
        pid, started = int(match[1]), int(match[2])
        alive = process_lives(pid, started) or _is_locked(name)
        found.append(SegmentFile(name, info.st_size, pid, alive))
    return tuple(found)


def sweep_segments() -> tuple[SegmentFile, ...]:
    """Remove the segments of our user whose owner is gone, and give back what was removed. Local.

    A segment whose lock is held, whose process lives, or which belongs to another user is never touched.
    """
    removed = []
    for segment in list_segments():
        if segment.alive:
            continue
        try:
            os.unlink(_path(segment.name))
        except FileNotFoundError:
            continue  # another sweep was faster
        removed.append(segment)
    return tuple(removed)


def free_bytes() -> int:
    """Bytes a segment could still take."""
    info = os.statvfs(SEGMENT_DIRECTORY)
    return info.f_bavail * info.f_frsize


def start_time_of(pid: int) -> int:
    """A process's start in clock ticks since boot, which together with its pid names it for good; 0 if it is gone."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else 0


def process_lives(pid: int, started: int) -> bool:
    """True while that very process runs. A zombie does not."""
    fields = _stat_fields(pid)
    return bool(fields) and fields[0] not in ("Z", "X") and int(fields[19]) == started


def _stat_fields(pid: int) -> list[str]:
    """/proc/<pid>/stat from the third field on (the second may contain spaces); empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _path(name: str) -> str:
    return f"{SEGMENT_DIRECTORY}/{name}"


def _own_file(name: str) -> os.stat_result | None:
    try:
        info = os.lstat(_path(name))
    except FileNotFoundError:
        return None
    return info if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() else None


def _is_locked(name: str) -> bool:
    """True if somebody holds the file's lock (also where that cannot be told)."""
    try:
        fd = os.open(_path(name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
