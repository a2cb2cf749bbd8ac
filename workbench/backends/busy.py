"""Busy: one thread at a time on a group's gloo connections, where two would mix up messages and end the process."""

from __future__ import annotations

import threading
from types import TracebackType

from workbench.errors import ArgumentError


class Busy:
    """`with busy:` around each use; nested uses by one thread are fine. `who` is the group and world rank, as text."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        """Local; waits for nobody. Raises ArgumentError while another thread is inside."""
        if not self._lock.acquire(blocking=False):
            raise ArgumentError(
                f"{self._who}: another thread is inside a call; a group serves one call at a time, so make its calls "
                f"from one thread, or one after the other"
            )

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._lock.release()
