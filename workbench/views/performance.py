"""Pictures of comparisons: time by message size, and what we take of the best peer's time. Computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.trace import Comparison, Role, Row, Scenario
from workbench.views import theme

OURS = "#0072B2"
SIMULATED = "#A8487F"
_LIMIT = "#8A8F98"
_PEERS = ("#E69F00", "#007A5A", "#B8482A", "#6A5FB0", "#A87300", "#56B4E9", "#7A2F5B", "#5CC5A4")
_HEAD = (
    *("tokens", "ours us", "p10 to p90", "again", "best peer us", "best peer"),
    *("ours / best peer", "p10 to p90", "simulated"),
)
_OPTIONAL = ("again", "simulated")  # left away where no row has one
_MEANING = {
    "again": "ours timed once more, the gap is noise",
    "ours / best peer": "below 1, ours is faster",
    "simulated": "us that the cost model says of ours",
}
_WORDS = {
    Scenario.TOGETHER: "all ranks come together",
    Scenario.SKEWED: "one rank comes late, time from its arrival",
    Scenario.GEMM: "between two matrix products, time of all three",
}


def performance_figure(comparison: Comparison, scenario: Scenario = Scenario.TOGETHER) -> go.Figure:
    """Left: microseconds by tokens, both axes logarithmic, bars from p10 to p90. Right: ours over the best peer."""
    rows = [row for row in comparison.rows if row.scenario is scenario]
    figure = make_subplots(
        rows=1,
        cols=2,
        column_widths=[0.66, 0.34],
        horizontal_spacing=0.1,
        subplot_titles=["µs a call, slowest rank", "ours / best peer"],
    )
    for trace in _lines(rows):
        figure.add_trace(trace, row=1, col=1)
    figure.add_trace(_ratios(rows), row=1, col=2)
    figure.add_hline(y=1, line={"color": theme.INK, "width": 1, "dash": "dot"}, row=1, col=2)
    figure.update_layout(
        **theme.layout(_title(comparison), height=500, subtitle=_WORDS[scenario]),
        margin={"l": 60, "r": 10, "t": 85, "b": 170},
    )
    figure.update_layout(legend={"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top", "xanchor": "left"})
    every = [row.tokens for row in rows]
    for column, ticks in ((1, every), (2, every[:: 1 + (len(every) - 1) // 8])):
        figure.update_xaxes(
            type="log", title_text="tokens", tickvals=ticks, ticktext=_short(ticks), gridcolor=theme.GRID, col=column
        )
    figure.update_yaxes(type="log", gridcolor=theme.GRID, dtick=1, col=1)
    figure.update_yaxes(rangemode="tozero", gridcolor=theme.GRID, col=2)
    return figure


def curves_figure(curves: Mapping[str, Mapping[float, float]], *, title: str, x_title: str, y_title: str) -> go.Figure:
    """Lines by name, each {x: y}, on logarithmic axes."""
    figure = go.Figure()
    for i, (name, points) in enumerate(curves.items()):
        figure.add_scatter(
            x=list(points),
            y=list(points.values()),
            mode="lines",
            name=escape(name),
            line={"color": (OURS, *_PEERS)[i % (1 + len(_PEERS))], "width": 2, "dash": "dash" if i % 2 else "solid"},
        )
    figure.update_layout(**theme.layout(title, height=420), margin={"l": 60, "r": 10, "t": 70, "b": 110})
    figure.update_layout(legend={"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top", "xanchor": "left"})
    figure.update_xaxes(type="log", title_text=x_title, gridcolor=theme.GRID, dtick=1)
    figure.update_yaxes(type="log", title_text=y_title, gridcolor=theme.GRID, dtick=1)
    return figure


def performance_text(comparison: Comparison) -> str:
    """The same as tables, one a scenario. Deterministic given the comparison."""
    blocks = []
    for scenario in comparison.scenarios():
        found = [_cells(row) for row in comparison.rows if row.scenario is scenario]
        columns = [c for c in zip(_HEAD, *found, strict=True) if c[0] not in _OPTIONAL or set(c[1:]) != {"-"}]
        widths = [max(map(len, column)) for column in columns]
        table = zip(*columns, strict=True)
        lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in table]
        meanings = [f"{h}: {_MEANING[h]}" for h, *_ in columns if h in _MEANING]
        explained = ["; ".join(meanings)] if meanings else []
        title = f"{_title(comparison)}: {_WORDS[scenario]}"
        blocks.append("\n".join([title, *lines, *explained, *_notes(comparison, scenario)]))
    return "\n\n".join(blocks)


def performance_markdown(comparison: Comparison) -> str:
    """The tables for a README, with every peer's time."""
    about = comparison.about
    with_ = ", ".join(f"{name} {about[name]}" for name in ("driver", "cuda", "torch", "nccl") if about.get(name))
    what = f"{about.get('date', '')}, {comparison.ranks} x {comparison.device}, {with_}"
    blocks = [f"{what}. `{about.get('command', '')}`"]
    for scenario in comparison.scenarios():
        rows = [row for row in comparison.rows if row.scenario is scenario]
        peers = {c.name: c.label for row in rows for c in row.columns if c.role in (Role.PEER, Role.PART, Role.LIMIT)}
        head = ["tokens", "ours, us", "p10 to p90", "best peer", "ours / best peer", *peers.values()]
        lines = [f"### {_title(comparison)}: {_WORDS[scenario]}", "", _pipes(head), _pipes(["---:"] * len(head))]
        for row in rows:
            tokens, ours, spread, _, _, best, ratio, _, _ = _cells(row)
            named = [row.named(name) for name in peers]
            times = ["-" if c is None else f"{c.us.median:.2f}" for c in named]
            lines.append(_pipes([tokens, f"**{ours}**", spread, best, f"**{ratio}**", *times]))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def _lines(rows: Sequence[Row]) -> list[go.Scatter]:
    names: dict[str, tuple[str, Role]] = {}
    for row in rows:
        for column in row.columns:
            if column.role in (Role.OURS, Role.PEER, Role.LIMIT):
                names.setdefault(column.name, (column.label, column.role))
    peers = [n for n, (_, role) in names.items() if role is Role.PEER]
    colours = dict(zip(peers, _PEERS * 4, strict=False))
    dashed = set(peers[len(_PEERS) :])  # whose colour is taken already
    lines = []
    for name, (label, role) in sorted(names.items(), key=lambda item: list(Role).index(item[1][1])):
        found = [(row.tokens, c) for row in rows for c in row.columns if c.name == name]
        ours = role is Role.OURS
        colour = OURS if ours else colours.get(name, _LIMIT)
        lines.append(
            go.Scatter(
                x=[tokens for tokens, _ in found],
                y=[c.us.median for _, c in found],
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": [c.us.p90 - c.us.median for _, c in found],
                    "arrayminus": [c.us.median - c.us.p10 for _, c in found],
                    "thickness": 1,
                    "width": 2,
                },
                mode="lines+markers",
                name=escape(f"ours ({label})" if ours else label),
                line={
                    "color": colour,
                    "width": 3.5 if ours else 1.5,
                    "dash": "dot" if role is Role.LIMIT else "dashdot" if name in dashed else "solid",
                },
                marker={"size": 7 if ours else 4},
                hovertemplate="%{x} tokens: %{y:.2f} µs<extra>%{fullData.name}</extra>",
            )
        )
    simulated = [(row.tokens, row.simulated_us) for row in rows if row.simulated_us is not None]
    if simulated:
        lines.append(
            go.Scatter(
                x=[tokens for tokens, _ in simulated],
                y=[us for _, us in simulated],
                mode="lines",
                name="cost model (simulated)",
                line={"color": SIMULATED, "width": 1.5, "dash": "dash"},
            )
        )
    return lines


def _ratios(rows: Sequence[Row]) -> go.Scatter:
    found = [(row.tokens, row.ratio, row.named(row.best_peer)) for row in rows if row.ratio is not None]
    return go.Scatter(
        x=[tokens for tokens, _, _ in found],
        y=[r.median for _, r, _ in found],
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [r.p90 - r.median for _, r, _ in found],
            "arrayminus": [r.median - r.p10 for _, r, _ in found],
            "thickness": 1,
            "width": 2,
        },
        mode="lines+markers",
        line={"color": OURS, "width": 3},
        marker={"size": 7},
        showlegend=False,
        hovertext=[f"{t} tokens: {r.median:.3f} of {escape(c.label) if c else ''}" for t, r, c in found],
        hoverinfo="text",
    )


def _cells(row: Row) -> tuple[str, ...]:
    ours, twice, best = row.column(Role.OURS), row.column(Role.AGAIN), row.named(row.best_peer)
    return (
        str(row.tokens),
        "-" if ours is None else f"{ours.us.median:.2f}",
        "-" if ours is None else f"{ours.us.p10:.2f} to {ours.us.p90:.2f}",
        "-" if twice is None else f"{twice.us.median:.2f}",
        "-" if best is None else f"{best.us.median:.2f}",
        "-" if best is None else best.label,
        "-" if row.ratio is None else f"{row.ratio.median:.3f}",
        "-" if row.ratio is None else f"{row.ratio.p10:.3f} to {row.ratio.p90:.3f}",
        "-" if row.simulated_us is None else f"{row.simulated_us:.2f}",
    )


def _notes(comparison: Comparison, scenario: Scenario) -> list[str]:
    rows = [row for row in comparison.rows if row.scenario is scenario]
    wrong = [f"WRONG at {row.tokens} tokens: {name}: {how}" for row in rows for name, how in row.wrong]
    reasons = dict.fromkeys(f"left out: {name}: {why}" for row in rows for name, why in row.left_out)
    crowded = [comparison.crowding] if comparison.crowding else []
    return [*crowded, *wrong, *reasons]


def _title(comparison: Comparison) -> str:
    return f"hidden {comparison.hidden}, {comparison.dtype}, {comparison.ranks} ranks on {comparison.device}"


def _short(tokens: Sequence[int]) -> list[str]:
    return [f"{n // 1024}K" if n >= 1024 and n % 1024 == 0 else str(n) for n in tokens]


def _pipes(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
