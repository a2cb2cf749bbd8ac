"""Ctrl-C that has to wait: for what must not be left half done, and takes a bounded time."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_later() -> Iterator[None]:
    """Have an interrupt that comes inside the block raised at its end. In other threads than the main one none comes.

    A signal mask would not do: any thread takes the signal, and Python handles it in the main one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[FrameType | None] = []
    before = signal.signal(signal.SIGINT, lambda _, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
        if came and callable(before):
            before(signal.SIGINT, came[0])
