"""Waiting by asking again and again, such as a loop around is_completed: one wait, as long as it goes on."""

from __future__ import annotations

import math
import os
import threading
import time
from dataclasses import dataclass
from typing import Any

from workbench.observe.process import this_process
from workbench.trace import ASKING, Token


@dataclass(slots=True)
class _Asking:
    """Since when the program asks, when it did last (infinity: it is inside), after how long it does something else."""

    since: float
    last: float
    again_s: float
    wait: Token | None = None

    def end(self, error: str = "") -> None:
        if self.wait is not None:
            this_process.recorder.end(self.wait, error=error)
            self.wait = None


class Askings:
    """What the program asks for, by anything that tells it from other things; any thread may ask."""

    def __init__(self) -> None:
        self._by_key: dict[Any, _Asking] = {}
        self._lock = threading.RLock()

    def __bool__(self) -> bool:
        return bool(self._by_key)

    def __contains__(self, key: Any) -> bool:
        return key in self._by_key

    def note(self, key: Any, again_s: float) -> None:
        """The program has asked just now, and was not answered. The wait, if it counts as one, ends `again_s` later."""
        now = time.monotonic()
        with self._lock:
            asking = self._by_key.setdefault(key, _Asking(now, now, again_s))
            if now - asking.last > again_s:
                asking.end()
                asking.since = now
            asking.last = now

    def count(self, key: Any, op: str, *, note: str, remark: str = ASKING, after_s: float = 0.0) -> None:
        """Record that the program waits, once it has asked for `after_s`."""
        with self._lock:
            asking = self._by_key.get(key)
            if asking is not None and asking.wait is None and time.monotonic() - asking.since >= after_s:
                asking.wait = this_process.recorder.begin(op, note=note, remark=remark)

    def enter(self, key: Any) -> None:
        """The program is inside the function that it asks: however long that takes, it asks no less."""
        with self._lock:
            if key in self._by_key:
                self._by_key[key].last = math.inf

    def end(self, key: Any, *, error: str = "") -> None:
        """The program was answered."""
        with self._lock:
            asking = self._by_key.pop(key, None)
            if asking is not None:
                asking.end(error)

    def end_what_nobody_asks(self, *, leaving: bool = False) -> None:
        """End the waits of a program that does something else by now; where it is `leaving`, all."""
        now = time.monotonic()
        with self._lock:
            gone = [key for key, asking in self._by_key.items() if leaving or now - asking.last > asking.again_s]
            for key in gone:
                self.end(key)

    def forget(self) -> None:
        """In a forked child: what is asked there is its parent's."""
        self.__init__()  # type: ignore[misc]  # a lock may be held by a thread that is not here


asked = Askings()
os.register_at_fork(after_in_child=asked.forget)
