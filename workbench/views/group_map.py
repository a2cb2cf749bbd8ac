"""The picture of a group map: a row a kind, a column a world rank, a cell for the group that holds the rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.ranks import GroupMap
from workbench.views import theme
from workbench.views.words import ranks_text

MAX_LABELLED = 64
"""The widest world whose cells carry the number of their group."""

_MAX_SPELT = 3_000  # cells; beyond, a cell's hover holds numbers only, and above _MAX_NUMBERED only its rank
_MAX_NUMBERED = 24_000
_ROW_PX = 30


def group_map_figure(group_map: GroupMap) -> go.Figure:
    """Ranks by kinds. A cell's colour and number tell its group; hovering tells members, numberings and origin.

    A number is the place of the group in creation order. Aliases come last, as thin rows named after what they are. A
    kind whose ranks are each alone is drawn faint, a rank in no group of the kind not at all. Below 300 kB for
    1,024 ranks.
    """
    figure = go.Figure()
    kinds = group_map.kinds
    for row, kind in enumerate(kinds):
        figure.add_trace(_row(group_map, kind, row, group_map.world_size * len(kinds)))
    wide = group_map.world_size > MAX_LABELLED
    notes = _notes(group_map)
    above_px = 88 if notes else 70  # title, notes, and the ranks' numbers
    figure.update_layout(
        **theme.layout(
            group_map.title().partition(" digest=")[0],
            subtitle=notes,
            height=_ROW_PX * len(kinds) + above_px + 16,
        ),
        showlegend=False,
        margin={"l": 10, "r": 10, "t": above_px, "b": 10},
    )
    figure.update_xaxes(
        title={"text": "world rank", "standoff": 4},
        side="top",
        range=[-0.5, group_map.world_size - 0.5],
        tickmode="linear",
        tick0=0,
        dtick=_tick_step(group_map.world_size),
        showgrid=False,
        zeroline=False,
        ticks="outside" if wide else "",
        ticklen=3,
        tickcolor=theme.GRID,
    )
    figure.update_yaxes(
        tickmode="array",
        tickvals=list(range(len(kinds))),
        ticktext=[_row_name(group_map, kind) for kind in kinds],
        range=[len(kinds) - 0.5, -0.5],
        showgrid=False,
        zeroline=False,
        automargin=True,
        fixedrange=True,
        ticks="outside",
        ticklen=6,
        tickcolor="rgba(0,0,0,0)",
    )
    return figure


def group_map_caption(group_map: GroupMap) -> str:
    """How to read the figure. Colours repeat where a kind has many groups, so a colour alone tells none."""
    number = "number" if group_map.world_size <= MAX_LABELLED else "number (hover to see it)"
    return (
        f"A column is a rank, a row a kind of group. Ranks with the same colour and {number} in a row sum together; "
        f"thin rows are aliases; in a faint row each rank is alone; a rank in no group of a kind has no cell."
    )


def group_map_text(group_map: GroupMap) -> str:
    """The figure's text twin: the map as it prints itself, and how each kind's lists came about."""
    width = max(len(kind) for kind in group_map.kinds)
    origins = [f"{kind:<{width}}  {group_map.origin(kind)}" for kind in group_map.kinds]
    return "\n".join([str(group_map), "", *origins])


def _row(group_map: GroupMap, kind: str, row: int, num_cells: int) -> go.Heatmap:
    groups = group_map.keys(kind)
    alone = all(g.size == 1 for g in groups)
    shades = (theme.FAINT,) if alone else theme.group_shades(groups[0].kind, len(groups))
    world = group_map.world_size
    shade = np.full(world, -1, np.int8)
    number = np.full(world, -1, np.int16)
    for place, group in enumerate(groups):
        shade[list(group.world_ranks)] = place % len(shades)
        number[list(group.world_ranks)] = place
    labels: dict[str, Any] = {}
    is_alias = kind in group_map.aliases
    if world <= MAX_LABELLED and not is_alias:
        texts = ["" if n < 0 else str(n) for n in number.tolist()]
        font = ({"color": theme.INK} if alone else {}) | ({"size": 10} if world > 32 else {})
        labels = {"text": [texts], "texttemplate": "%{text}", "textfont": font}
    return go.Heatmap(
        name=kind,
        z=shade.reshape(1, world),
        **{"x0": 0, "dx": 1, "y0": row, "dy": 0.5 if is_alias else 1},
        **{
            "zmin": -1.5,
            "zmax": len(shades) - 0.5,
            "colorscale": _bands(("rgba(0,0,0,0)", *shades)),
            "showscale": False,
        },
        **{"xgap": 1 if world <= 256 else 0, "ygap": 4},
        **labels,
        **_hover(group_map, kind, num_cells),
    )


def _hover(group_map: GroupMap, kind: str, num_cells: int) -> dict[str, Any]:
    """Texts for small maps; numbers for wide ones, in two bytes each, so that the figure stays small."""
    groups = group_map.keys(kind)
    world = group_map.world_size
    local = kind in group_map.local_numbering
    head = f"<b>{'engine-local' if local else 'world'} rank %{{x}}</b>, {_row_name(group_map, kind)}"
    tail = f"<br><i>{group_map.origin(kind)}</i><extra></extra>"
    if num_cells <= _MAX_SPELT:
        texts = ["in no group of this kind"] * world
        for place, group in enumerate(groups):
            members = f"group {place}: {'rank' if group.size == 1 else 'ranks'} {ranks_text(group.world_ranks)}"
            for group_rank, rank in enumerate(group.world_ranks):
                texts[rank] = f"{members}<br>group rank {group_rank} of 0..{group.size - 1}"
                if group.numbering_differs:
                    texts[rank] += f", torch rank {group.torch_rank(rank)}"
        return {"customdata": [texts], "hovertemplate": f"{head}<br>%{{customdata}}{tail}"}
    if num_cells > _MAX_NUMBERED:
        return {"hovertemplate": head + tail}
    differs = any(g.numbering_differs for g in groups)
    numbers = np.full((1, world, 3 if differs else 2), -1, np.int16)
    for place, group in enumerate(groups):
        ascending = sorted(group.world_ranks)
        for group_rank, rank in enumerate(group.world_ranks):
            numbers[0, rank, :2] = place, group_rank
            if differs:
                numbers[0, rank, 2] = ascending.index(rank)
    sizes = sorted({g.size for g in groups})
    size = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    torch_rank = ", torch rank %{customdata[2]}" if differs else ""
    body = f"<br>group %{{customdata[0]}} of {size} ranks<br>group rank %{{customdata[1]}}{torch_rank}"
    none = "" if sum(g.size for g in groups) == world else " (-1: in no group)"
    return {"customdata": numbers, "hovertemplate": f"{head}{body}{none}{tail}"}


def _bands(colours: tuple[str, ...]) -> list[list[Any]]:
    """A colour scale of equal flat bands."""
    return [[(n + edge) / len(colours), c] for n, c in enumerate(colours) for edge in (0, 1)]


def _row_name(group_map: GroupMap, kind: str) -> str:
    if kind in group_map.aliases:
        return f"{kind} = {group_map.aliases[kind]}"
    return f"{kind} *" if kind in group_map.numbering_differs else kind


def _notes(group_map: GroupMap) -> str:
    notes = []
    if group_map.numbering_differs:
        notes.append("* lists not ascending: torch numbers their members otherwise")
    if group_map.local_numbering:
        notes.append(f"ranks counted inside one engine: {', '.join(group_map.local_numbering)}")
    return "; ".join(notes)


def _tick_step(world_size: int) -> int:
    """At most 32 numbers on the axis, at round steps."""
    return next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1 << 20) if world_size <= 32 * step)
