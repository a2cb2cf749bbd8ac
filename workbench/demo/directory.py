"""Where a demo writes: a private directory that one run at a time may hold."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workbench.errors import ArgumentError

DEFAULT = "workbench-demo"
_OURS = {"spec.json", "result.json", "report.html", "trace", "logs"}


@contextmanager
def claim_directory(asked: Path | None) -> Iterator[Path]:
    """An empty directory, mode 0700, held for the time of the block: `asked`, else workbench-demo in the current one.

    What an earlier demo wrote there is removed. While another run holds the default, workbench-demo-2 and so on serve.
    Raises: ArgumentError if `asked` is held by another run, is no directory, or holds files that are not a demo's.
    """
    names = [asked] if asked else [Path(DEFAULT), *(Path(f"{DEFAULT}-{i}") for i in range(2, 100))]
    for path in names:
        handle = _hold(path.absolute())
        if handle is None:
            continue
        try:
            _empty(path.absolute())
            yield path.absolute()
        finally:
            os.close(handle)
        return
    raise ArgumentError(f"{names[0]} is in use by another run; wait for it or choose another directory with --out")


def _hold(path: Path) -> int | None:
    """An open, locked handle of the directory, or None if another run has it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as e:
        raise ArgumentError(
            f"{path} cannot be used as output directory: {e.strerror}; choose another with --out"
        ) from e
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def _empty(path: Path) -> None:
    foreign = sorted(p.name for p in path.iterdir() if p.name not in _OURS)
    if foreign:
        raise ArgumentError(f"{path} holds {foreign[0]!r}, which no demo wrote; choose an empty directory with --out")
    for entry in list(path.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
