"""Files that are written whole or not at all, so that a reader never meets half of one."""

from __future__ import annotations

import os
from pathlib import Path

from workbench.errors import ArgumentError


def check_place(path: Path) -> None:
    """Raise ArgumentError now if a file cannot be written at `path` later. Changes nothing there."""
    directory = path.absolute().parent
    if path.is_dir() or not directory.is_dir() or not os.access(directory, os.W_OK):
        raise ArgumentError(f"{path} cannot be written: no directory, or not yours to write in; choose another place")


def write_whole(path: Path, text: str) -> None:
    """Put `text` in place of what is there. Raises: ArgumentError for a place that cannot be written."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as e:
        raise ArgumentError(f"{path} cannot be written: {e.strerror}; choose another place") from e
