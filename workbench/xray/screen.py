"""A block of lines at the end of a terminal, drawn again in place. On anything but a terminal it is never drawn."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from typing import TextIO

_EVERY_S = 0.5
_MOST_LINES = 16


class Screen:
    """Where each rank stands, refreshed while nothing moves."""

    def __init__(self, stream: TextIO) -> None:
        self.wanted = stream.isatty()
        self._stream = stream
        self._drawn = 0
        self._next = 0.0

    def due(self, now_s: float) -> bool:
        """Whether it is time to draw again."""
        return now_s >= self._next

    def show(self, lines: Sequence[str], *, cost_s: float) -> None:
        """Draw these lines over the last ones. cost_s: what finding them took; they are then sought less often."""
        width = shutil.get_terminal_size().columns - 1
        shown = [line[:width] for line in lines[:_MOST_LINES]]
        if len(lines) > _MOST_LINES:
            shown.append(f"... and {len(lines) - _MOST_LINES} more"[:width])
        self.clear()
        self._stream.write("".join(f"{line}\n" for line in shown))
        self._stream.flush()
        self._drawn = len(shown)
        self._next = time.monotonic() + max(_EVERY_S, 10 * cost_s)

    def clear(self) -> None:
        """Take the block away."""
        if self._drawn:
            self._stream.write(f"\x1b[{self._drawn}A\x1b[J")
            self._stream.flush()
            self._drawn = 0
