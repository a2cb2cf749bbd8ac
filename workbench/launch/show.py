"""Showing what ranks print: live in a notebook, line by line in a terminal, once and sorted under a test."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from IPython import get_ipython
from IPython.display import display, publish_display_data

from workbench.launch.output import RankOutput, Rich, merge_lines
from workbench.launch.selection import ranks_label

Outputs = Mapping[int, RankOutput]
_HOLD_S = 0.015  # how long a line waits for the same line of other ranks
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
    return os.environ.get("WORKBENCH_TEST") == "1" or (
        "PYTEST_CURRENT_TEST" in os.environ and getattr(get_ipython(), "kernel", None) is not None
    )


class OnceDisplay:
    """Everything at the end, by rank: the same text whatever came first."""

    def update(self, outputs: Outputs) -> None:
        """Wait for the end."""

    def finish(self, outputs: Outputs) -> None:
        _print_all(outputs)
        _show_rich({r: o.rich for r, o in outputs.items()})


class LineDisplay:
    """Lines as they come. A line waits a moment for the same line of other ranks, and is then printed for good."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[int, int]] = {}
        self._rich: dict[int, int] = {}
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
        self._show_rich(outputs)

    def finish(self, outputs: Outputs) -> None:
        self._tell(self._fresh(outputs, whole_lines=False))
        self._show_rich(outputs)

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

    def _show_rich(self, outputs: Outputs) -> None:
        _show_rich({r: o.rich[self._rich.get(r, 0) :] for r, o in outputs.items()})
        self._rich = {r: len(o.rich) for r, o in outputs.items()}


class LiveDisplay:
    """One text in a notebook, rewritten while ranks print, so that equal lines come together as they arrive."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown = ""
        self._next = 0.0
        self._rich: dict[int, int] = {}

    def update(self, outputs: Outputs) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._draw(outputs)
            self._next = time.monotonic() + max(_FRAME_S, 5 * (time.monotonic() - now))  # long texts: seldom

    def finish(self, outputs: Outputs) -> None:
        self._draw(outputs)

    def _draw(self, outputs: Outputs) -> None:
        text = merge_lines({r: o.stdout for r, o in outputs.items()})
        text += merge_lines({r: o.stderr for r, o in outputs.items()}, note=" stderr")
        if text != self._shown:
            self._shown = text
            if self._handle is None:
                self._handle = display(_Text(text), display_id=True)  # type: ignore[no-untyped-call]  # IPython's
            else:
                self._handle.update(_Text(text))
        _show_rich({r: o.rich[self._rich.get(r, 0) :] for r, o in outputs.items()})
        self._rich = {r: len(o.rich) for r, o in outputs.items()}


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


def _show_rich(by_rank: Mapping[int, Sequence[Rich]]) -> None:
    """Figures by place and rank; one that several ranks made alike is shown once."""
    for n in range(max((len(found) for found in by_rank.values()), default=0)):
        parties: list[tuple[Rich, list[int]]] = []
        for r, found in sorted(by_rank.items()):
            if n < len(found):
                party = next((ranks for rich, ranks in parties if rich == found[n]), None)
                if party is None:
                    parties.append((found[n], [r]))
                else:
                    party.append(r)
        for (data, metadata), ranks in parties:
            print(f"[{ranks_label(ranks)}]", flush=True)
            publish_display_data(dict(data), dict(metadata))  # type: ignore[no-untyped-call]  # IPython's
