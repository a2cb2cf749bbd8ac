"""Pins what the sweep of /dev/shm takes away and, more important, what it never touches."""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from workbench.backends.segments import (
    OwnSegment,
    list_segments,
    map_segment,
    process_lives,
    start_time_of,
    sweep_segments,
)
from workbench.errors import ResourceError

SHM = Path("/dev/shm")


def plant(pid: int, started: int) -> Path:
    """A file that looks like a segment of that process. Removed by the test's sweep or its finally."""
    path = SHM / f"wbk-{pid}-{started}-{secrets.token_hex(8)}"
    path.touch(mode=0o600)
    return path


def names(found: tuple[object, ...]) -> set[str]:
    return {segment.name for segment in found}  # type: ignore[attr-defined]


def ended_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_segment_is_private_locked_and_listed_until_unlinked() -> None:
    segment = OwnSegment(8192)
    try:
        info = (SHM / segment.name).stat()
        assert (info.st_mode & 0o777, info.st_size, info.st_uid) == (0o600, 8192, os.geteuid())
        assert segment.name.startswith(f"wbk-{os.getpid()}-{start_time_of(os.getpid())}-")
        [listed] = [s for s in list_segments() if s.name == segment.name]
        assert (listed.size_bytes, listed.owner_pid, listed.alive) == (8192, os.getpid(), True)
        assert segment.name not in names(sweep_segments())
        peer = map_segment(segment.name, 8192)
        segment.memory[5] = 77
        assert peer.memory[5] == 77
        segment.unlink()
        assert segment.name not in names(list_segments())
        segment.memory[6] = 78
        assert peer.memory[6] == 78
    finally:
        segment.close()
        segment.close()


def test_an_owner_holds_the_lock_of_its_segment_as_long_as_it_is_mapped() -> None:
    """The lock is what a sweep in another process namespace goes by, where the process cannot be seen."""
    segment = OwnSegment(4096)
    other = os.open(SHM / segment.name, os.O_RDWR)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        segment.close()
        del segment
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(other)


def test_a_process_killed_between_create_and_unlink_is_swept() -> None:
    code = (
        "from workbench.backends.segments import OwnSegment; import time\n"
        "s = OwnSegment(4096); print(s.name, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        assert name not in names(sweep_segments())
        assert (SHM / name).exists()
        process.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 30
        while process_lives(process.pid, int(name.split("-")[2])):  # a zombie is gone too
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert name in names(sweep_segments())
        assert not (SHM / name).exists()
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_pid_used_again_does_not_protect_a_dead_owner() -> None:
    path = plant(os.getpid(), start_time_of(os.getpid()) + 1)
    try:
        assert path.name in names(sweep_segments())
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)


def test_a_held_lock_protects_even_if_the_process_is_not_seen() -> None:
    """As with an owner in another process namespace."""
    path = plant(ended_process(), 1)
    with path.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert path.name not in names(sweep_segments())
        assert path.exists()
    assert path.name in names(sweep_segments())


def test_a_live_process_protects_even_before_it_holds_the_lock() -> None:
    path = plant(os.getpid(), start_time_of(os.getpid()))
    try:
        assert path.name not in names(sweep_segments())
        assert path.exists()
    finally:
        path.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_another_users_segment_is_neither_listed_nor_swept_nor_mapped() -> None:
    path = plant(ended_process(), 1)
    try:
        os.chown(path, 12345, 12345)
        assert path.name not in names(list_segments())
        assert path.name not in names(sweep_segments())
        assert path.exists()
        with pytest.raises(ResourceError, match="uid 12345"):
            map_segment(path.name, 0)
    finally:
        path.unlink()


def test_other_names_and_links_are_left_alone() -> None:
    other = SHM / f"wbk-note-{secrets.token_hex(4)}"
    other.touch()
    link = SHM / f"wbk-1-1-{secrets.token_hex(8)}"
    link.symlink_to(other)
    try:
        assert not {other.name, link.name} & (names(list_segments()) | names(sweep_segments()))
        assert link.is_symlink()
        assert other.exists()
        with pytest.raises(ResourceError, match="cannot be opened"):
            map_segment(link.name, 0)
        with pytest.raises(ResourceError, match="not a segment's name"):
            map_segment("../etc/passwd", 0)
    finally:
        link.unlink()
        other.unlink()


def test_a_segment_of_another_size_is_not_mapped() -> None:
    segment = OwnSegment(4096)
    try:
        with pytest.raises(ResourceError, match=r"4096 bytes; expected uid .* 8192 bytes"):
            map_segment(segment.name, 8192)
    finally:
        segment.close()


def test_a_zombie_does_not_live() -> None:
    process = subprocess.Popen(["sleep", "60"])
    started = start_time_of(process.pid)
    assert process_lives(process.pid, started)
    assert not process_lives(process.pid, started + 1)
    process.kill()
    deadline = time.monotonic() + 30
    while process_lives(process.pid, started):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.wait()
    assert not process_lives(process.pid, started)
