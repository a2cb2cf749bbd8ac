"""The picture of a capture: a lane a rank; its wait at the door, warm-up, capture, replays, and the calls inside."""

from __future__ import annotations

from html import escape

import plotly.graph_objects as go

from workbench.trace import CaptureTimeline, Span, Stage
from workbench.views import theme
from workbench.views.words import time_text, time_unit

_COLOURS = {
    Stage.DOOR: "#8A8F98",
    Stage.WARM_UP: "#8A8F98",
    Stage.CAPTURE: "#E69F00",
    Stage.CALL: "#0072B2",
    Stage.REPLAY: "#009E73",
}
_OPACITIES = {Stage.DOOR: 0.2, Stage.CAPTURE: 0.35}
_LANE_PX = 30


def timeline_figure(timeline: CaptureTimeline) -> go.Figure:
    """Time from left to right. Calls lie as thin bars inside their capture; an error is a vermilion outline.

    A rank comes to a capture where its pale bar at the door begins; the capture begins once the last has come.
    """
    unit, size = time_unit(timeline.end_ns - timeline.start_ns)
    names = [str(r) for r in timeline.world_ranks]
    figure = go.Figure()
    for stage in Stage:
        spans = [s for s in timeline.spans if s.stage is stage]
        if not spans:
            continue
        figure.add_bar(
            orientation="h",
            y=[str(s.world_rank) for s in spans],
            base=[(s.start_ns - timeline.start_ns) / size for s in spans],
            x=[_length(s, timeline) / size for s in spans],
            width=0.4 if stage is Stage.CALL else 0.8,
            marker={
                "color": theme.fade(_COLOURS[stage], _OPACITIES.get(stage, 0.9)),
                "line": {
                    "color": [theme.ALARM if s.error or s.end_ns is None else _COLOURS[stage] for s in spans],
                    "width": [3 if s.error or s.end_ns is None else 1 for s in spans],
                },
            },
            name=stage.value,
            hovertext=[_hover(s, timeline) for s in spans],
            hoverinfo="text",
        )
    figure.update_layout(
        **theme.layout("", height=_LANE_PX * max(len(names), 2) + 130),
        barmode="overlay",
        margin={"l": 10, "r": 10, "t": 50, "b": 40},
    )
    figure.update_xaxes(title_text=f"time since the first event [{unit}]")
    figure.update_yaxes(
        title_text="world rank", type="category", categoryorder="array", categoryarray=names, autorange="reversed"
    )
    return figure


def timeline_text(timeline: CaptureTimeline) -> str:
    """The same as lines, in order of time. Deterministic given the timeline."""
    lines = []
    for span in timeline.spans:
        since = time_text(span.start_ns - timeline.start_ns)
        length = "never ended" if span.end_ns is None else time_text(span.end_ns - span.start_ns)
        failed = f"; failed: {span.error}" if span.error else ""
        lines.append(f"+{since}  world rank {span.world_rank}  {span.stage.value}: {span.text}, {length}{failed}")
    return "\n".join(lines)


def _length(span: Span, timeline: CaptureTimeline) -> int:
    return (span.end_ns if span.end_ns is not None else timeline.end_ns) - span.start_ns


def _hover(span: Span, timeline: CaptureTimeline) -> str:
    length = "never ended" if span.end_ns is None else time_text(span.end_ns - span.start_ns)
    failed = f"<br>failed: {escape(span.error)}" if span.error else ""
    return (
        f"world rank {span.world_rank}, {span.stage.value}: {escape(span.text)}<br>"
        f"{length}, at +{time_text(span.start_ns - timeline.start_ns)}{failed}"
    )
