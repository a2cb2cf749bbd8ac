"""The picture of measured times: fused beside others, a panel for each number of tokens, a few bars a kind."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.trace import Sample
from workbench.views import theme

MOST_MEMBERS = 8
"""Members that are listed under a bar; the text beside a bar names all."""


def timings_figure(samples: Sequence[Sample]) -> go.Figure:
    """Bars: the kind's colour for the fused path, pale for the same in steps, grey for others.

    Whiskers: all rounds.
    """
    tokens = sorted({s.tokens for s in samples})
    kinds = list(dict.fromkeys(s.kind for s in samples))
    variants = list(dict.fromkeys(s.variant for s in samples))
    figure = make_subplots(
        rows=1,
        cols=len(tokens),
        shared_yaxes=True,
        horizontal_spacing=0.03,
        subplot_titles=[f"{t} token{'s' if t != 1 else ''}" for t in tokens],
    )
    for column, count in enumerate(tokens, start=1):
        for variant in variants:
            chosen = {s.kind: s for s in samples if s.tokens == count and s.variant == variant}
            rows = [chosen[k] for k in kinds if k in chosen]
            first = variant == variants[0]
            figure.add_bar(
                x=[escape(_label(s.kind)) for s in rows],
                y=[s.median_us for s in rows],
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": [s.worst_us - s.median_us for s in rows],
                    "arrayminus": [s.median_us - s.best_us for s in rows],
                    "color": theme.INK,
                    "thickness": 1,
                },
                marker={"color": [_colour(s, fused=first) for s in rows]},
                name=f"{escape(variant)}, in the colour of its kind" if first else escape(variant),
                legendgroup=variant,
                showlegend=column == 1,
                hovertext=[_hover(s) for s in rows],
                hoverinfo="text",
                row=1,
                col=column,
            )
    look = theme.layout("", height=340)
    look["legend"] |= {"y": 1.14}  # above the panels' titles
    figure.update_layout(**look, barmode="group", margin={"l": 60, "r": 10, "t": 70, "b": 20})
    figure.update_yaxes(gridcolor=theme.GRID, **_scale(samples))
    figure.update_yaxes(title_text="µs a call, slowest member", col=1)
    return figure


def timings_text(samples: Sequence[Sample]) -> str:
    """The same as a table. Deterministic given the samples."""
    wide = max(14, *(len(s.kind) for s in samples), 0)
    lines = [f"{'kind':<{wide}} {'variant':<9} {'tokens':>6} {'median us':>10} {'best':>10} {'worst':>10}"]
    lines += [
        f"{s.kind:<{wide}} {s.variant:<9} {s.tokens:>6} {s.median_us:>10.1f} {s.best_us:>10.1f} {s.worst_us:>10.1f}"
        for s in samples
    ]
    return "\n".join(lines)


def _colour(sample: Sample, *, fused: bool) -> str:
    if fused:
        return theme.kind_colour(sample.kind)
    return theme.mix(theme.kind_colour(sample.kind), "#FFFFFF", 0.55) if sample.variant == "steps" else "#A0A4AB"


def _scale(samples: Sequence[Sample]) -> dict[str, str]:
    """The axis: logarithmic where bars differ much in length, with ticks at 1, 2, 5; else from zero, so that lengths
    compare."""
    times_us = [t for s in samples for t in (s.best_us, s.worst_us)] or [1.0]
    if max(times_us) < 4 * min(times_us):
        return {"type": "linear", "rangemode": "tozero"}
    return {"type": "log", "dtick": "D2"}


def _label(kind: str) -> str:
    """What stands under a bar: a group with many members by its first and last, 'tp[0,1,..15]'."""
    name, bracket, members = kind.rstrip("]").partition("[")
    ranks = members.split(",")
    return kind if len(ranks) <= MOST_MEMBERS else f"{name}{bracket}{ranks[0]},{ranks[1]},..{ranks[-1]}]"


def _hover(s: Sample) -> str:
    return (
        f"{escape(s.kind)}, {s.tokens} tokens, {escape(s.variant)}<br>{s.median_us:.1f} µs "
        f"({s.best_us:.1f} to {s.worst_us:.1f}, {s.rounds} rounds of {s.calls} calls)"
    )
