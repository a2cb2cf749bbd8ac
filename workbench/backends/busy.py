"""Busy: one call at a time on a group's gloo connections, where two would mix up messages and end the process.

The second may come from another thread, or from a signal handler or a finalizer in the midst of the first.
"""

from __future__ import annotations

import threading
from types import TracebackType

from workbench.errors import ArgumentError


class Busy:
    """`with busy:` around each use, never nested. `who` is the group and world rank, as text."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        """Local; waits for nobody. Raises ArgumentError while another call is inside."""
        if not self._lock.acquire(blocking=False):
            raise ArgumentError(
                f"{self._who}: another call is not over yet, of another thread or of what a signal handler interrupts; "
                f"a group serves one call at a time, so make its calls one after the other"
            )

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._lock.release()
