"""Where a command writes: a private directory that one run at a time may hold, and private files in it."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workbench.errors import ArgumentError


@contextmanager
def claim_directory(asked: Path | None, *, command: str = "demo") -> Iterator[Path]:
    """An empty directory of our own, held for the time of the block: `asked`, else workbench-<command> in this one.

    What an earlier run of the same command wrote there is removed; a directory that it made is known by its marker
    file, and only such a one is ever emptied. While another run holds the default, workbench-<command>-2 and so on
    serve.
    Raises: ArgumentError if `asked` is held by another run, is no directory, belongs to or can be written by others, or
    holds anything and no marker.
    """
    default = f"workbench-{command}"
    names = [asked] if asked else [Path(default), *(Path(f"{default}-{i}") for i in range(2, 100))]
    for path in names:
        handle = _hold(path.absolute())
        if handle is None:
            continue
        try:
            _empty(path.absolute(), command)
            yield path.absolute()
        finally:
            os.close(handle)
        return
    raise ArgumentError(f"{names[0]} is in use by another run; wait for it or choose another directory with --out")


def write_private(path: Path, text: str) -> None:
    """Write a new file that only this user can read. Raises FileExistsError rather than follow or replace anything."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def _hold(path: Path) -> int | None:
    """An open, locked handle of the directory, or None if another run has it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:
        raise ArgumentError(
            f"{path} cannot be used as output directory: {e.strerror}; choose another with --out"
        ) from e
    try:
        info = os.fstat(handle)
        if info.st_uid != os.geteuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ArgumentError(
                f"{path} belongs to uid {info.st_uid} with mode {stat.filemode(info.st_mode)}; it must be yours and "
                f"writable by nobody else; choose another with --out"
            )
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except BaseException:
        os.close(handle)
        raise
    return handle


def _empty(path: Path, command: str) -> None:
    marker = f".workbench-{command}"
    found = sorted(p.name for p in path.iterdir())
    if found and marker not in found:
        raise ArgumentError(
            f"{path} holds {found[0]!r}, and no {command} made it; choose an empty directory with --out"
        )
    for entry in list(path.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    write_private(path / marker, f"A directory of `workbench {command}`: the next run in it removes everything here.\n")
