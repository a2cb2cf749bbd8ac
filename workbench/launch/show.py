"""Showing what ranks print: live in a notebook, line by line in a terminal, once and sorted under a test."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

from IPython import get_ipython
from IPython.display import display, publish_display_data

from workbench.launch.output import RankOutput, Rich, merge_lines
from workbench.launch.selection import ranks_label
from workbench.settings import Settings

Outputs = Mapping[int, RankOutput]
_HOLD_S = 0.015  # how long a line waits for the same line of other ranks
_HOLD_FIGURE_S = 0.5
_FRAME_S = 0.025


class Display(Protocol):
    """Where a cell's output goes. `update` may be called at any rate; `finish` once, with everything."""

    def update(self, outputs: Outputs) -> None: ...

    def finish(self, outputs: Outputs) -> None: ...


def choose_display() -> Display:
    """The display for where this process runs."""
    if is_test():
        return OnceDisplay()
    return LiveDisplay() if getattr(get_ipython(), "kernel", None) is not None else LineDisplay()


def is_test() -> bool:
    """Whether output is compared with stored output: WORKBENCH_TEST=1, or a kernel that pytest (nbval) started."""
    return Settings.read().test or (
        "PYTEST_CURRENT_TEST" in os.environ and getattr(get_ipython(), "kernel", None) is not None
    )


class OnceDisplay:
    """Everything at the end, by rank: the same text whatever came first."""

    def update(self, outputs: Outputs) -> None:
        """Wait for the end."""

    def finish(self, outputs: Outputs) -> None:
        _print_all(outputs)
        _Figures().show(outputs, hold=False)


class LineDisplay:
    """Lines as they come. A line waits a moment for the same line of other ranks, and is then printed for good."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[int, int]] = {}
        self._figures = _Figures()
        self._since: float | None = None

    def update(self, outputs: Outputs) -> None:
        fresh = self._fresh(outputs, whole_lines=True)
        waiting = any(o.stdout or o.stderr for o in fresh.values())
        if not waiting:
            self._since = None
        elif self._since is None:
            self._since = time.monotonic()
        if waiting and (all(o.stdout for o in fresh.values()) or time.monotonic() - (self._since or 0) >= _HOLD_S):
            self._tell(fresh)
        self._figures.show(outputs)

    def finish(self, outputs: Outputs) -> None:
        self._tell(self._fresh(outputs, whole_lines=False))
        self._figures.show(outputs, hold=False)

    def _fresh(self, outputs: Outputs, *, whole_lines: bool) -> dict[int, RankOutput]:
        fresh = {}
        for r, output in outputs.items():
            out_at, err_at = self._told.get(r, (0, 0))
            texts = [output.stdout[out_at:], output.stderr[err_at:]]
            if whole_lines:
                texts = [text[: text.rfind("\n") + 1] for text in texts]
            fresh[r] = RankOutput(stdout=texts[0], stderr=texts[1])
        return fresh

    def _tell(self, fresh: Outputs) -> None:
        _print_all(fresh)
        for r, output in fresh.items():
            out_at, err_at = self._told.get(r, (0, 0))
            self._told[r] = (out_at + len(output.stdout), err_at + len(output.stderr))
        self._since = None


class LiveDisplay:
    """One text in a notebook, rewritten while ranks print, so that equal lines come together as they arrive."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown = ""
        self._next = 0.0
        self._figures = _Figures()

    def update(self, outputs: Outputs) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._draw(outputs)
            self._next = time.monotonic() + max(_FRAME_S, 5 * (time.monotonic() - now))  # long texts: seldom
        self._figures.show(outputs)

    def finish(self, outputs: Outputs) -> None:
        self._draw(outputs)
        self._figures.show(outputs, hold=False)

    def _draw(self, outputs: Outputs) -> None:
        text = merge_lines({r: o.stdout for r, o in outputs.items()})
        text += merge_lines({r: o.stderr for r, o in outputs.items()}, note=" stderr")
        if text != self._shown:
            self._shown = text
            if self._handle is None:
                self._handle = display(_Text(text), display_id=True)  # type: ignore[no-untyped-call]  # IPython's
            else:
                self._handle.update(_Text(text))


class _Text:
    """Plain text as a display: without the quotes of a string."""

    def __init__(self, text: str) -> None:
        self._text = text.removesuffix("\n")

    def __repr__(self) -> str:
        return self._text


def _print_all(outputs: Outputs) -> None:
    out = merge_lines({r: o.stdout for r, o in outputs.items()})
    err = merge_lines({r: o.stderr for r, o in outputs.items()})
    if out:
        print(out, end="", flush=True)
    if err:
        print(err, end="", file=sys.stderr, flush=True)


class _Figures:
    """Figures in order. One that several ranks made alike is shown once, so each waits a moment for its like."""

    def __init__(self) -> None:
        self._shown: Counter[int] = Counter()
        self._since: float | None = None

    def show(self, outputs: Outputs, *, hold: bool = True) -> None:
        """Show the next figure of each rank, once every rank has one or has been waited for; without `hold`, all."""
        while next_ones := {r: o.rich[self._shown[r]] for r, o in outputs.items() if len(o.rich) > self._shown[r]}:
            self._since = self._since or time.monotonic()
            if hold and len(next_ones) < len(outputs) and time.monotonic() - self._since < _HOLD_FIGURE_S:
                return
            self._show_place(next_ones)
            self._shown.update(next_ones.keys())
            self._since = None

    def _show_place(self, figures: Mapping[int, Rich]) -> None:
        parties: list[tuple[Rich, list[int]]] = []
        for r, figure in sorted(figures.items()):
            party = next((ranks for rich, ranks in parties if rich == figure), None)
            if party is None:
                parties.append((figure, [r]))
            else:
                party.append(r)
        for (data, metadata), ranks in parties:
            print(f"[{ranks_label(ranks)}]", flush=True)
            publish_display_data(dict(data), dict(metadata))  # type: ignore[no-untyped-call]  # IPython's
