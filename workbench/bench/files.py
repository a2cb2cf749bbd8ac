"""Files: earlier results, and those written whole or not at all, so that a reader never meets half of one."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from workbench.documents import read_document
from workbench.errors import ArgumentError
from workbench.trace import Comparison, read_comparison

_RESULT_BYTES = 16 << 20


def read_baseline(path: Path) -> Comparison:
    """An earlier result. Raises: ArgumentError for a file that holds none."""
    return read_comparison(read_document(path, at_most=_RESULT_BYTES))


def check_place(path: Path) -> None:
    """Raise ArgumentError now if a file cannot be written at `path` later. Changes nothing there."""
    target = _target(path)
    if not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise ArgumentError(f"{path} cannot be written: no directory, or not yours to write in; choose another place")


def make_directory(path: Path) -> None:
    """Make a directory to write into, unless it is there. Raises: ArgumentError if that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ArgumentError(f"{path} cannot be made: {e.strerror}; choose another place") from e
    if not os.access(path, os.W_OK):
        raise ArgumentError(f"{path} is not yours to write in; choose another place")


def write_whole(path: Path, text: str) -> None:
    """Put `text` in place of the file at `path`; through a link, in place of what it names.

    Raises: ArgumentError for a place that cannot be written, and for a device, a pipe or a directory, which stay.
    """
    target = _target(path)
    beside = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}")
    try:
        try:
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)  # a full disk or Ctrl-C must not leave half a file
    except OSError as e:
        raise ArgumentError(f"{path} cannot be written: {e.strerror}; choose another place") from e


def _target(path: Path) -> Path:
    """The file that `path` names in the end. Raises ArgumentError for what a rename would destroy."""
    try:
        target = path.resolve()
        if target.exists() and not target.is_file():
            raise ArgumentError(f"{path} cannot be written: it is no regular file; choose another place")
    except (OSError, RuntimeError) as e:  # a name too long, a loop of links
        raise ArgumentError(f"{path} cannot be written: {e}; choose another place") from e
    return target
