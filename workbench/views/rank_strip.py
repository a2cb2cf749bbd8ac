"""The strip of ranks: a box a rank, with its state in words and in colour."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Protocol

import plotly.graph_objects as go

from workbench.views import theme

STATES = ("idle", "running", "silent", "dead")
"""What a rank may be, and the order of the colours. "silent": alive, but it did not even say where it stands."""

_COLOURS = (theme.FAINT, "#5B6472", "#C9CDD3", theme.ALARM)
_MOST_WORDS = 16  # ranks; beyond, a box has no room for a word


class Standing(Protocol):
    """Where one rank stands, as Cluster.where() tells it."""

    @property
    def world_rank(self) -> int: ...

    @property
    def state(self) -> str: ...

    @property
    def last(self) -> str: ...


def rank_strip_figure(standings: Sequence[Standing]) -> go.Figure:
    """One row, a box a rank in world order. Hovering tells the last call. A state that is not known is drawn as silent.

    Vermilion is a dead rank; the others are greys, since hues belong to kinds of groups.
    """
    ranks = sorted(standings, key=lambda s: s.world_rank)
    places = [STATES.index(s.state) if s.state in STATES else STATES.index("silent") for s in ranks]
    words = [escape(s.state) if len(ranks) <= _MOST_WORDS else "" for s in ranks]
    bands = [[(n + edge) / len(STATES), c] for n, c in enumerate(_COLOURS) for edge in (0, 1)]
    figure = go.Figure(
        go.Heatmap(
            z=[places],
            x=[str(s.world_rank) for s in ranks],
            text=[[f'<span style="color:{theme.INK}">{w}</span>' if w == "idle" else w for w in words]],
            texttemplate="%{text}",
            customdata=[[f"{escape(s.state)}; {escape(s.last)}" for s in ranks]],
            hovertemplate="<b>world rank %{x}</b><br>%{customdata}<extra></extra>",
            **{"zmin": -0.5, "zmax": len(STATES) - 0.5, "colorscale": bands, "showscale": False},
            **{"xgap": 3, "ygap": 0},
        )
    )
    figure.update_layout(
        **theme.layout(escape(_title(ranks)), height=104), margin={"l": 10, "r": 10, "t": 58, "b": 8}, showlegend=False
    )
    figure.update_xaxes(type="category", side="top", title={"text": "world rank", "standoff": 2}, showgrid=False)
    figure.update_yaxes(visible=False, fixedrange=True)
    return figure


def rank_strip_text(standings: Sequence[Standing]) -> str:
    """The figure's text twin: a line a rank."""
    ranks = sorted(standings, key=lambda s: s.world_rank)
    width = max((len(str(s.world_rank)) for s in ranks), default=1)
    lines = [f"world rank {s.world_rank:>{width}}  {s.state:<7}  {s.last}".rstrip() for s in ranks]
    return "\n".join([_title(ranks), *lines])


def _title(ranks: Sequence[Standing]) -> str:
    states = [s.state for s in ranks]
    counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    return f"{len(ranks)} rank{'' if len(ranks) == 1 else 's'}: {', '.join(counts)}"
