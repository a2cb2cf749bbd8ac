"""Compiled objects in the cache end with a seal, so that one cut short by a full disk or a crash is never loaded.

The loader maps an object without looking at its length; a short one kills the process with SIGBUS. Bytes after the end
of an object mean nothing to the loader, so the seal travels in the same file and the same rename.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
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
    return _holds_seal(data)


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
    install_bytes(source.read_bytes(), target, source)


def install_bytes(data: bytes, target: Path, source: Path) -> None:
    """Put the bytes of a sealed object, read from `source`, in place. Raises ResourceError if they are not whole."""
    if not _holds_seal(data):
        raise ResourceError(f"{source} is damaged: it does not end with the sha256 of itself; copy or compile it again")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="copy-") as scratch:
        made = Path(scratch, "made.so")
        made.write_bytes(data[:-_SEAL_BYTES])
        put_in_place(made, target)


def read_trusted(path: Path) -> bytes:
    """The bytes of an object that will be loaded, from a directory that only its owner, this user or root, can write.

    The seal tells damage, not who wrote: whoever can put a file there could run what they like here.
    Raises: ResourceError for a directory or file of another user, one that group or others can write, and for what is
        no regular file, a link among them.
    """
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _require_trusted(os.fstat(directory), path.parent)
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not hold us up
            with open(os.open(path.name, flags, dir_fd=directory), "rb") as file:
                _require_trusted(os.fstat(file.fileno()), path)
                return file.read()
        finally:
            os.close(directory)
    except OSError as e:
        why = "it is a link" if e.errno == errno.ELOOP else e.strerror
        raise ResourceError(f"{path} is not taken: {why}; copy the object itself to where you can read it") from e


def _require_trusted(info: os.stat_result, path: Path) -> None:
    kind = stat.S_ISDIR(info.st_mode) or stat.S_ISREG(info.st_mode)
    if not kind or info.st_uid not in (os.geteuid(), 0) or info.st_mode & 0o022:
        raise ResourceError(
            f"{path} is not taken: owner uid {info.st_uid}, mode {stat.filemode(info.st_mode)}; what is loaded must be "
            f"a file of uid {os.geteuid()} or of root, in a directory of theirs, both writable by nobody else; copy it "
            f"to a directory of your own, or take the rights away with chmod go-w"
        )


def _holds_seal(data: bytes) -> bool:
    return len(data) > _SEAL_BYTES and data[-_SEAL_BYTES:] == _seal(data[:-_SEAL_BYTES])


def _seal(data: bytes) -> bytes:
    return _MARK + hashlib.sha256(data).digest()
