"""Which frame of a stack is the program's own, and whether it waits there for something that no rank sends."""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence

from workbench.observe import Frame

_WAITING = re.compile(
    r"/(queue|threading|selectors|socket|ssl|socketserver|subprocess)\.py$"
    r"|/multiprocessing/(connection|queues|synchronize|managers|popen_\w+)\.py$"
    r"|/(asyncio|concurrent/futures|zmq|grpc|redis|uvloop|uvicorn|aiohttp)/"
)
_WAITS_IN_C = re.compile(r"\b(select|poll|recv\w*|accept|readline|input)\(|\.get\((\)|timeout=|block=)")


def program_frame(stack: Sequence[Frame]) -> Frame | None:
    """The innermost frame outside libraries, else the outermost; None of an empty stack. Innermost first."""
    return next((f for f in stack if not _is_library(f.file)), stack[-1] if stack else None)


def waits_for_work(stack: Sequence[Frame]) -> bool:
    """Whether the program stands in a queue, a socket, a pipe or a lock, as a server without requests does."""
    own = program_frame(stack)
    if own is None:
        return False
    inside = stack[: stack.index(own)]
    if any("/torch/" in frame.file for frame in inside):
        return False
    if inside:
        return _WAITING.search(inside[0].file) is not None
    return _WAITS_IN_C.search(linecache.getline(own.file, own.line)) is not None


def _is_library(file: str) -> bool:
    return "site-packages/" in file or "dist-packages/" in file or "/lib/python3" in file or file.startswith("<")
