"""Compiled objects in the cache end with a seal, so that one cut short by a full disk or a crash is never loaded.

The loader maps an object without looking at its length; a short one kills the process with SIGBUS. Bytes after the end
of an object mean nothing to the loader, so the seal travels in the same file and the same rename.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from workbench.errors import ResourceError

_MARK = b"\0wbk-sealed-1\0"
_SEAL_BYTES = len(_MARK) + 32  # the mark, and the sha256 of all bytes before it


def is_whole(path: Path) -> bool:
    """True if `path` holds exactly the bytes that `put_in_place` put there. False if it is missing."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return False
    return len(data) > _SEAL_BYTES and data[-_SEAL_BYTES:] == _seal(data[:-_SEAL_BYTES])


def put_in_place(made: Path, target: Path) -> None:
    """Seal `made` and rename it to `target`; both are on the disk before anyone can see the new name."""
    with made.open("r+b") as file:
        seal = _seal(file.read())
        file.write(seal)
        file.flush()
        os.fchmod(file.fileno(), 0o700)
        os.fsync(file.fileno())
    made.replace(target)
    directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def copy_in_place(source: Path, target: Path) -> None:
    """Put a copy of a sealed object in place. Raises ResourceError if `source` is not whole."""
    if not is_whole(source):
        raise ResourceError(f"{source} is damaged: it does not end with the sha256 of itself; copy or compile it again")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="copy-") as scratch:
        made = Path(scratch, "made.so")
        made.write_bytes(source.read_bytes()[:-_SEAL_BYTES])
        put_in_place(made, target)


def _seal(data: bytes) -> bytes:
    return _MARK + hashlib.sha256(data).digest()
