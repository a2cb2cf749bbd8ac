"""The picture of a rendezvous trace: a lane a rank, a bar a call, and who waited for whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from typing import Any

import plotly.graph_objects as go

from workbench.trace import Call, Lanes, Presence, Visit
from workbench.views import theme
from workbench.views.words import ranks_text, time_text, time_unit, who

MAX_VISITS = 1000
"""The most visits (one rank in one call) that are drawn: the newest calls win, and the title says so."""

_LANE_PX = 26
_MANY_CALLS = 60  # beyond, the signs are drawn small
_MOST_LABELS = 40
_OUTLINE: dict[str, Any] = {
    "marker": {"color": theme.fade(theme.ALARM, 0.12), "line": {"color": theme.ALARM, "width": 1.5}},
    "width": 0.86,
    "legendrank": 2000,
}


def lanes_figure(lanes: Lanes) -> go.Figure:
    """Time from left to right, a lane a rank. A bar is pale while its rank waits for others, then full.

    A thin line joins the members of a call at the last arrival; its diamond sits on the rank that came last, and the
    arrowheads of those that waited point to it. A striped bar ends in the open: the rank is still inside. A vermilion
    outline is a rank that never came; one around a striped bar is a rank that others await while it is inside another
    call, and a label on it names both calls. A dotted grey line is a rank of which no record is left. Below 300 kB.
    """
    calls = _newest(lanes.calls)
    unit, size = time_unit(lanes.end_ns - lanes.start_ns)
    draw = _Drawing(lanes, size, sign_px=9 if len(calls) <= _MANY_CALLS else 5)
    for call in calls:
        draw.add(call)
    figure = go.Figure(draw.traces())
    figure.update_layout(
        **theme.layout(escape(_title(lanes, calls)), height=_LANE_PX * max(len(lanes.world_ranks), 2) + 130),
        annotations=draw.labels(),
        barmode="overlay",
        bargap=0,
        margin={"l": 10, "r": 10, "t": 72, "b": 40},
    )
    span = (lanes.end_ns - lanes.start_ns) / size or 1.0
    figure.update_xaxes(
        title={"text": f"time since the first event [{unit}]"},
        range=[-0.01 * span, 1.03 * span],
        zeroline=False,
    )
    figure.update_yaxes(
        title={"text": "world rank"},
        tickmode="array",
        tickvals=list(range(len(lanes.world_ranks))),
        ticktext=[str(r) for r in lanes.world_ranks],
        range=[len(lanes.world_ranks) - 0.4, -0.6],
        showgrid=False,
        zeroline=False,
        fixedrange=True,
    )
    return figure


def lanes_text(lanes: Lanes) -> str:
    """The figure's text twin: a line for each call, in the order in which they began. Times since the first event."""
    calls = _newest(lanes.calls)
    lines, inside = [_title(lanes, calls)], _inside(lanes)
    for call in calls:
        at = time_text(call.start_ns - lanes.start_ns)
        lines.append(f"{at:>9}  {_name(call)}: {_story(call, lanes, inside)}")
    return "\n".join(lines)


def _story(call: Call, lanes: Lanes, inside: dict[int, Call]) -> str:
    """One sentence on who waited for whom."""
    parts = []
    if call.waiting:
        longest = max(v.waited_ns for v in call.visits if v.presence is Presence.WAITING)
        since = max(lanes.end_ns - (v.arrive_ns or lanes.end_ns) for v in call.visits if v.presence is Presence.WAITING)
        if call.missing:
            elsewhere = "".join(f"; rank {r} is inside {_name(inside[r])}" for r in call.missing if r in inside)
            parts.append(
                f"{who(call.waiting)} waited {time_text(longest)} for {who(call.missing)}, which never came{elsewhere}"
            )
        elif call.unknown:
            parts.append(f"{who(call.waiting)} waited {time_text(longest)}; no record of {who(call.unknown)}")
        else:
            parts.append(f"all came; {who(call.waiting)} still inside after {time_text(since)}")
    elif call.missing:
        parts.append(f"{who(call.missing)} never came")
    elif call.waited_for:
        waits = sorted((v.waited_ns, -v.world_rank) for v in call.visits if v.waited_ns)
        longest, first = waits[-1]
        parts.append(f"rank {-first} waited {time_text(longest)} for {who(call.waited_for)}")
    else:
        parts.append("nobody waited")
    if call.unknown and not call.waiting:
        parts.append(f"no record of {who(call.unknown)}")
    for visit in call.visits:
        if visit.presence is Presence.FAILED:
            parts.append(f"rank {visit.world_rank} failed: {visit.error}")
    return "; ".join(parts)


def _inside(lanes: Lanes) -> dict[int, Call]:
    """The call that a rank is still inside, by world rank."""
    return {rank: call for call in lanes.stuck for rank in call.waiting}


def _name(call: Call) -> str:
    return f"{call.op} #{call.sequence} on {_group(call)}"


def _title(lanes: Lanes, calls: Sequence[Call]) -> str:
    count = f"{len(calls)} call{'' if len(calls) == 1 else 's'}"
    if len(calls) < len(lanes.calls):
        count = f"the newest {len(calls)} of {len(lanes.calls)} calls"
    notes = [f"{len(lanes.world_ranks)} ranks, {count}, {time_text(lanes.end_ns - lanes.start_ns)}"]
    if lanes.stuck:
        notes.append(f"{len(lanes.stuck)} still open")
    if not lanes.complete:
        notes.append("records are missing")
    if lanes.num_clocks > 1:
        notes.append(f"{lanes.num_clocks} clocks: order between hosts is approximate")
    return "; ".join(notes)


def _group(call: Call) -> str:
    group = call.group
    name = f"{group.key.kind}[{ranks_text(group.world_ranks)}]"
    return name if group.generation == 0 else f"{name} generation {group.generation}"


def _newest(calls: Sequence[Call]) -> Sequence[Call]:
    left = MAX_VISITS
    for n in range(len(calls) - 1, -1, -1):
        left -= len(calls[n].visits)
        if left < 0:
            return calls[n + 1 :]
    return calls


class _Bars:
    """Horizontal bars of one look."""

    def __init__(self) -> None:
        self.base: list[float] = []
        self.length: list[float] = []
        self.lane: list[int] = []

    def add(self, lane: int, start: float, end: float) -> None:
        self.base.append(start)
        self.length.append(round(end - start, 3))
        self.lane.append(lane)

    def __iter__(self) -> Iterator[tuple[int, float, float]]:
        """Lane, base and length of each."""
        return zip(self.lane, self.base, self.length, strict=True)

    def trace(self, **look: Any) -> go.Bar:
        """Without a bar it still has its entry in the legend."""
        bars = {"base": self.base, "x": self.length, "y": self.lane} if self.base else {"x": [None], "y": [None]}
        return go.Bar(**bars, orientation="h", hoverinfo="skip", **look)


class _Points:
    """Points of one look; `lift` ends a line."""

    def __init__(self) -> None:
        self.x: list[float | None] = []
        self.y: list[float | None] = []

    def add(self, x: float, y: float) -> None:
        self.x.append(x)
        self.y.append(y)

    def lift(self) -> None:
        self.x.append(None)
        self.y.append(None)

    def scatter(self, **look: Any) -> go.Scatter:
        return go.Scatter(x=self.x, y=self.y, hoverinfo="skip", **look)


class _Drawing:
    """Collects what is drawn, by look: a trace for each kind and for each sign."""

    def __init__(self, lanes: Lanes, size_ns: float, *, sign_px: int) -> None:
        self._lanes, self._size_ns, self._sign_px = lanes, size_ns, sign_px
        self._lane = {rank: n for n, rank in enumerate(lanes.world_ranks)}
        self._inside = _inside(lanes)
        self._waits: dict[str, _Bars] = {}
        self._insides: dict[str, _Bars] = {}
        self._open: dict[str, _Bars] = {}
        self._joins, self._lasts, self._up, self._down = _Points(), _Points(), _Points(), _Points()
        self._missing = _Bars()
        self._missing_texts: list[str] = []
        self._awaited = _Bars()
        self._labels: dict[int, dict[str, Any]] = {}
        self._unknown = _Points()
        self._failed = _Points()
        self._hover = _Bars()
        self._texts: list[str] = []

    def add(self, call: Call) -> None:
        kind = call.group.key.kind
        arrivals = {v.world_rank: v.arrive_ns for v in call.visits if v.arrive_ns is not None}
        all_came = not call.missing and not call.unknown
        met_ns = max(arrivals.values()) if all_came and arrivals else None
        for visit in call.visits:
            self._visit(call, visit, kind, met_ns)
        if met_ns is not None and len(call.waited_for) == 1 and len(call.visits) > 1:
            self._join(arrivals, call.waited_for[0], met_ns)

    def traces(self) -> list[Any]:
        """From back to front. A legend entry that only explains a look is drawn in grey and holds no bar."""
        traces: list[Any] = []
        for kind in sorted(self._waits.keys() | self._insides.keys() | self._open.keys()):
            colour = theme.kind_colour(kind)
            look: dict[str, Any] = {"legendgroup": escape(kind), "width": 0.62, "name": escape(kind)}
            pale, full, hatched = _looks(colour)
            traces += [
                self._insides.get(kind, _Bars()).trace(marker=full, **look),
                self._waits.get(kind, _Bars()).trace(marker=pale, showlegend=False, **look),
                self._open.get(kind, _Bars()).trace(marker=hatched, showlegend=False, **look),
            ]
        pale, _, hatched = _looks(theme.INK)
        if self._waits:
            traces.append(_Bars().trace(name="waits for others", marker=pale))
        if self._open:
            traces.append(_Bars().trace(name="still inside", marker=hatched))
        if self._unknown.x:
            dots = {"color": theme.INK, "dash": "dot", "width": 2}
            traces.append(self._unknown.scatter(mode="lines", line=dots, name="no record"))
        if self._missing.base:
            traces.append(self._outlines())
        if self._awaited.base:
            traces.append(self._awaited.trace(name="awaited in another call", **_OUTLINE))
        sign: dict[str, Any] = {"color": "#FFFFFF", "line": {"color": "#333333", "width": 1}}
        if self._lasts.x:
            line = {"color": theme.INK, "width": 1}
            traces += [
                self._joins.scatter(mode="lines", line=line, showlegend=False),
                self._up.scatter(
                    mode="markers", marker=sign | {"symbol": "triangle-up", "size": self._sign_px - 1}, showlegend=False
                ),
                self._down.scatter(
                    mode="markers",
                    marker=sign | {"symbol": "triangle-down", "size": self._sign_px - 1},
                    showlegend=False,
                ),
                self._lasts.scatter(
                    mode="markers", marker=sign | {"symbol": "diamond", "size": self._sign_px}, name="came last"
                ),
            ]
        if self._failed.x:
            cross = {"symbol": "x", "size": 9, "color": theme.ALARM}
            traces.append(self._failed.scatter(mode="markers", marker=cross, name="failed"))
        clear = {"color": "rgba(0,0,0,0)", "line": {"width": 0}}
        hover = self._hover.trace(marker=clear, width=0.8, showlegend=False)
        hover.update(hoverinfo=None, customdata=self._texts, hovertemplate="%{customdata}<extra></extra>")
        return [*traces, hover]

    def _outlines(self) -> go.Bar:
        """Around the lanes of ranks that never came; the words only where no bar lies beneath them."""
        drawn = [(lane, base, base + length) for bars in self._bars() for lane, base, length in bars]
        texts = [
            "" if any(lane == at and start < base + length and end > base for at, start, end in drawn) else text
            for (lane, base, length), text in zip(self._missing, self._missing_texts, strict=True)
        ]
        words: dict[str, Any] = {"text": texts, "textposition": "inside", "insidetextanchor": "middle"}
        words |= {"textangle": 0, "insidetextfont": {"color": theme.ALARM, "size": 11}, "constraintext": "none"}
        return self._missing.trace(name="never came", **_OUTLINE, **words)

    def labels(self) -> list[dict[str, Any]]:
        """On a rank that is inside one call and awaited in another: where it is and who waits, one label a lane."""
        return list(self._labels.values())

    def _await(self, lane: int, start: float, end: float, inside: Call, call: Call) -> None:
        self._awaited.add(lane, start, end)
        if len(self._labels) < _MOST_LABELS:
            text = f"inside {escape(inside.op)}; awaited by {who(call.waiting)} in {escape(call.op)}"
            box = {"bgcolor": "#FFFFFF", "bordercolor": theme.ALARM, "borderpad": 1}
            at = {"x": round((start + end) / 2, 3), "y": lane, "showarrow": False}
            self._labels.setdefault(lane, {"text": text, "font": {"color": "#333333", "size": 11}, **box, **at})

    def _bars(self) -> Iterator[_Bars]:
        for by_kind in (self._waits, self._insides, self._open):
            yield from by_kind.values()

    def _visit(self, call: Call, visit: Visit, kind: str, met_ns: int | None) -> None:
        """The bar of one rank in one call: pale up to the moment all had come, full from then on."""
        lane = self._lane[visit.world_rank]
        first, last = self._at(call.start_ns), self._at(self._lanes.end_ns)
        start = first if visit.arrive_ns is None else self._at(visit.arrive_ns)
        end = last if visit.leave_ns is None else self._at(visit.leave_ns)
        inside = self._inside.get(visit.world_rank)
        if visit.presence is Presence.MISSING and call.waiting and inside is not None:
            self._await(lane, first, last, inside, call)
        elif visit.presence is Presence.MISSING:
            self._missing.add(lane, first, last)
            self._missing_texts.append(f"never came; {who(call.waiting)} waiting" if call.waiting else "never came")
        elif visit.presence is Presence.UNKNOWN:
            self._unknown.add(first, lane)
            self._unknown.add(last if call.waiting else self._last_moment(call), lane)
            self._unknown.lift()
        elif visit.presence is Presence.WAITING:
            self._open.setdefault(kind, _Bars()).add(lane, start, end)
        else:
            met = end if met_ns is None else min(max(self._at(met_ns), start), end)
            if met > start:
                self._waits.setdefault(kind, _Bars()).add(lane, start, met)
            self._insides.setdefault(kind, _Bars()).add(lane, met, end)
        if visit.presence is Presence.FAILED:
            self._failed.add(end, lane)
        self._hover.add(lane, start, end)
        self._texts.append(self._hover_text(call, visit))

    def _join(self, arrivals: dict[int, int], last_rank: int, met_ns: int) -> None:
        """The line at the last arrival, its diamond, and an arrowhead on each rank that waited."""
        x, lanes = self._at(met_ns), [self._lane[r] for r in arrivals]
        target = self._lane[last_rank]
        self._joins.add(x, min(lanes))
        self._joins.add(x, max(lanes))
        self._joins.lift()
        self._lasts.add(x, target)
        for lane in lanes:
            if lane != target:  # lanes are drawn from the top: a lower number lies above and points down
                (self._down if lane < target else self._up).add(x, lane)

    def _at(self, time_ns: int) -> float:
        return round((time_ns - self._lanes.start_ns) / self._size_ns, 3)

    def _last_moment(self, call: Call) -> float:
        return self._at(max(t for v in call.visits for t in (v.arrive_ns, v.leave_ns) if t is not None))

    def _hover_text(self, call: Call, visit: Visit) -> str:
        """A few short lines. Names come from a recorded program and are escaped."""
        start_ns = self._lanes.start_ns
        lines = [
            f"<b>rank {visit.world_rank}</b>: {escape(visit.op or call.op)} #{call.sequence} on {escape(_group(call))}"
        ]
        if visit.presence is Presence.MISSING:
            lines.append(f"never came; {who(call.waiting)} waiting" if call.waiting else "never came")
        elif visit.presence is Presence.UNKNOWN:
            lines.append("no record: its trace is missing or has lost events")
        else:
            came = "" if visit.arrive_ns is None else f"came at {time_text(visit.arrive_ns - start_ns)}"
            left = "still inside" if visit.leave_ns is None else f"left at {time_text(visit.leave_ns - start_ns)}"
            lines.append(", ".join(w for w in (came, left) if w))
            if visit.waited_ns:
                for_whom = f" for {who(call.waited_for)}" if call.waited_for else ""
                lines.append(f"waited {time_text(visit.waited_ns)}{for_whom}")
            elif visit.world_rank in call.waited_for:
                lines.append("came last")
        if visit.error:
            lines.append(escape(_shorten(visit.error, 160)))
        if visit.site is not None:
            file = visit.site.file if visit.site.in_cell else _shorten(visit.site.file, -40)
            lines.append(escape(str(replace(visit.site, file=file))))
        return "<br>".join(lines)


def _looks(colour: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Markers of a bar that waits, one that is inside after all came, and one that never left: pale, full, striped."""
    edge = {"color": colour, "width": 1}
    stripes: dict[str, Any] = {"shape": "/", "fgcolor": colour, "bgcolor": theme.fade(colour, 0.1), "size": 10}
    stripes |= {"solidity": 0.5, "fgopacity": 0.8}
    pale = {"color": theme.fade(colour, 0.25), "line": edge}
    return pale, {"color": colour, "line": edge}, pale | {"pattern": stripes}


def _shorten(text: str, length: int) -> str:
    """At most |length| characters: the first ones, or with a negative length the last ones."""
    if len(text) <= abs(length):
        return text
    return f"{text[: length - 3]}..." if length > 0 else f"...{text[length + 3 :]}"
