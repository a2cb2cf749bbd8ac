"""Figures and tables as a notebook shows them: drawn where plotly is drawn, as text where it is not.

A figure has no background of its own and inks that read on white and on black, so it serves Lab's light and dark theme.
What is stored in a notebook is the figure's JSON and its text twin; never a widget, never a copy of plotly.js.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import plotly.graph_objects as go

from workbench.ranks import GroupMap
from workbench.trace import Lanes, Sample
from workbench.views.group_map import group_map_figure, group_map_text
from workbench.views.lanes import lanes_figure, lanes_text
from workbench.views.rank_strip import Standing, rank_strip_figure, rank_strip_text
from workbench.views.timings import timings_figure, timings_text

PLOTLY = "application/vnd.plotly.v1+json"
"""The MIME type of a figure's JSON: JupyterLab, VS Code and nbclient know it."""


_HINT = "(no picture here: `python -m workbench.notebooks --html FILE.ipynb` writes a page with the figures)"


@dataclass(frozen=True, slots=True, repr=False)
class Shown:
    """One thing to show: data by MIME type. Its text is always there, for terminals, screen readers and comparisons."""

    data: dict[str, Any]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:  # noqa: ARG002  # IPython's
        """A figure's text ends with how to get its picture, for exports that draw no plotly."""
        return self.data | {"text/plain": f"{self!r}\n\n{_HINT}"} if PLOTLY in self.data else self.data

    def __repr__(self) -> str:
        return str(self.data["text/plain"])


def show_figure(figure: go.Figure, twin: str) -> Shown:
    """A plotly figure with its text twin."""
    return Shown({PLOTLY: json.loads(figure.to_json()), "text/plain": twin})


def show_group_map(group_map: GroupMap) -> Shown:
    """Who is in which group: a row a kind, a column a world rank."""
    return show_figure(group_map_figure(group_map), group_map_text(group_map))


def show_lanes(lanes: Lanes, *, newest: int | None = None) -> Shown:
    """Who waited for whom: a lane a rank, a bar a call.

    newest: only that many calls, the last ones, and the time from the first of them to the end of the last, or to the
    end of the record if a rank is still inside: cells run minutes apart, and all their calls together would be specks.
    """
    if newest is not None:
        calls = lanes.calls[-newest:] if newest > 0 else ()
        arrivals = [v.arrive_ns for call in calls for v in call.visits if v.arrive_ns is not None]
        lanes = replace(lanes, calls=calls, start_ns=min(arrivals, default=lanes.start_ns))
        if not lanes.stuck:
            leaves = [v.leave_ns for call in calls for v in call.visits if v.leave_ns is not None]
            lanes = replace(lanes, end_ns=max(leaves, default=lanes.end_ns))
    return show_figure(lanes_figure(lanes), lanes_text(lanes))


def show_timings(samples: Sequence[Sample]) -> Shown:
    """Measured times: a panel for each number of tokens, bars side by side."""
    return show_figure(timings_figure(samples), timings_text(samples))


def show_ranks(standings: Sequence[Standing]) -> Shown:
    """How each rank is, and the last call it made."""
    return show_figure(rank_strip_figure(standings), rank_strip_text(standings))


def show_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Shown:
    """A table; numbers stand to the right. Deterministic given its cells, so that a test may compare it."""
    texts = [tuple(str(cell) for cell in row) for row in rows]
    widths = [max(len(row[i]) for row in [tuple(head), *texts]) for i in range(len(head))]
    numeric = [all(_is_number(row[i]) for row in rows) for i in range(len(head))]
    lines = []
    for row in [tuple(head), *texts]:
        cells = [c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True)]
        lines.append("  ".join(cells).rstrip())
    aligned = [' style="text-align: right"' if n else ' style="text-align: left"' for n in numeric]
    html = ["<table>", f"<thead><tr>{_html_row('th', head, aligned)}</tr></thead>", "<tbody>"]
    html += [f"<tr>{_html_row('td', row, aligned)}</tr>" for row in texts]
    html += ["</tbody>", "</table>"]
    return Shown({"text/html": "\n".join(html), "text/plain": "\n".join(lines)})


def _html_row(tag: str, cells: Sequence[str], aligned: Sequence[str]) -> str:
    return "".join(f"<{tag}{style}>{escape(cell)}</{tag}>" for cell, style in zip(cells, aligned, strict=True))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
