"""Comparison: ways to the same result timed side by side, as `workbench measure` writes them and pictures draw them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from workbench.documents import Document, parse_document, show_value
from workbench.trace.sample import tell_crowding

MAX_US = 1e9


class Role(Enum):
    """What a column is for.

    ours: the path a Session takes.   again: the same, timed a second time; the gap is the noise.
    peer: another way to the same result.   part: a part of the work, such as the sum alone.
    limit: less work than any way can do, such as a bare write to the peer.
    """

    OURS = "ours"
    AGAIN = "again"
    PEER = "peer"
    PART = "part"
    LIMIT = "limit"


class Scenario(Enum):
    """together: all ranks come at once, call after call.   skewed: one rank comes late by a known time; the time counts
    from its arrival.   gemm: each call stands between two matrix products; the time is that of all three."""

    TOGETHER = "together"
    SKEWED = "skewed"
    GEMM = "gemm"


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, 10th and 90th percentile of the rounds."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        deciles = statistics.quantiles(values, n=10, method="inclusive")
        return cls(statistics.median(values), deciles[0], deciles[-1])

    def to_json(self) -> dict[str, float]:
        return {"median": round(self.median, 4), "p10": round(self.p10, 4), "p90": round(self.p90, 4)}

    @classmethod
    def read(cls, doc: Document) -> Spread:
        spread = cls(*(_number(doc, name) for name in ("median", "p10", "p90")))
        doc.end()
        if not spread.p10 <= spread.median <= spread.p90:
            doc.refuse("p10, median and p90 must ascend")
        return spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One way, at one number of tokens. us: microseconds a call; each round counts with its slowest rank."""

    name: str
    label: str
    role: Role
    us: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """All ways at one number of tokens.

    path: the plan of our own way, in words.   ratio: ours over the best peer, round by round; None if one is missing
    or took no time that could be told from the wait for a late rank.
    wrong: ways whose result was wrong, and how; they are not timed.   left_out: ways that could not run here, and why.
    simulated_us: what the cost model says of our algorithm; None where it knows no such machine.
    """

    scenario: Scenario
    tokens: int
    path: str
    columns: tuple[Column, ...]
    best_peer: str | None = None
    ratio: Spread | None = None
    wrong: tuple[tuple[str, str], ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    simulated_us: float | None = None

    def column(self, role: Role) -> Column | None:
        """The first column of a role."""
        return next((c for c in self.columns if c.role is role), None)

    def named(self, name: str | None) -> Column | None:
        """The column of that name."""
        return next((c for c in self.columns if c.name == name), None)

    def to_json(self) -> dict[str, Any]:
        return {
            "scenario": self.scenario.value,
            "tokens": self.tokens,
            "path": self.path,
            "columns": {c.name: {"label": c.label, "role": c.role.value, "us": c.us.to_json()} for c in self.columns},
            "best_peer": self.best_peer,
            "ratio": None if self.ratio is None else self.ratio.to_json(),
            "wrong": dict(self.wrong),
            "left_out": dict(self.left_out),
            "simulated_us": None if self.simulated_us is None else round(self.simulated_us, 2),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A whole run. about: what it was measured on and with, and the command that does it again."""

    ranks: int
    hidden: int
    dtype: str
    device: str
    about: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    finished: bool = False

    @property
    def wrong(self) -> tuple[str, ...]:
        """Every wrong result, in words."""
        return tuple(
            f"{name} at {row.tokens} tokens ({row.scenario.value}): {how}"
            for row in self.rows
            for name, how in row.wrong
        )

    @property
    def crowding(self) -> str:
        """What more CPU ranks than cores mean for the times; "" on GPUs, with enough cores, or where none are told."""
        cores = self.about.get("cores")
        if not isinstance(cores, int) or cores < 1 or self.about.get("arch") != "cpu":
            return ""
        return tell_crowding(self.ranks, cores)

    def scenarios(self) -> tuple[Scenario, ...]:
        """The scenarios there are rows of."""
        return tuple(s for s in Scenario if any(row.scenario is s for row in self.rows))

    def to_json(self) -> dict[str, Any]:
        head = {"ranks": self.ranks, "hidden": self.hidden, "dtype": self.dtype, "device": self.device}
        rows = [row.to_json() for row in self.rows]
        return {
            "schema": 1,
            "what": "fused",
            **head,
            "about": dict(self.about),
            "rows": rows,
            "finished": self.finished,
        }


def read_comparison(doc: Document) -> Comparison:
    """The comparison in a document. Raises ArgumentError naming the field that does not fit."""
    doc.take_whole("schema", 1, 1)
    doc.take_text("what", pattern="fused")
    about = doc.take_value("about")
    comparison = Comparison(
        ranks=doc.take_whole("ranks", 1, 1 << 16),
        hidden=doc.take_whole("hidden", 1, 1 << 20),
        dtype=doc.take_text("dtype", at_most=16),
        device=doc.take_text("device", at_most=100),
        about=about if isinstance(about, Mapping) else doc.refuse("about is no object"),
        rows=tuple(_row(row) for row in doc.take_children("rows")),
        finished=doc.take_flag("finished"),
    )
    doc.end()
    return comparison


def parse_comparison(text: str, where: str) -> Comparison:
    """The comparison that `text` holds; `where` names it in errors."""
    return read_comparison(parse_document(text, where))


def _row(doc: Document) -> Row:
    columns = doc.take_child("columns")
    best = doc.take_value("best_peer")
    simulated = doc.take_value("simulated_us")
    row = Row(
        scenario=doc.take_choice("scenario", Scenario),
        tokens=doc.take_whole("tokens", 1, 1 << 24),
        path=doc.take_text("path", at_most=2000),
        columns=tuple(_column(columns.take_child(name), name) for name in columns.names()),
        best_peer=None if best is None else doc.take_text("best_peer"),
        ratio=None if doc.take_value("ratio") is None else Spread.read(doc.take_child("ratio")),
        wrong=_reasons(doc.take_child("wrong")),
        left_out=_reasons(doc.take_child("left_out")),
        simulated_us=None if simulated is None else _number(doc, "simulated_us"),
    )
    doc.end()
    best_column = row.named(row.best_peer)
    if row.best_peer is not None and (best_column is None or best_column.role is not Role.PEER):
        doc.refuse(f"best_peer is {show_value(row.best_peer)}; allowed: a column whose role is peer, or null")
    if row.ratio is not None and (best_column is None or row.column(Role.OURS) is None):
        doc.refuse("a ratio needs our way and the best peer; allowed: null")
    return row


def _column(doc: Document, name: str) -> Column:
    column = Column(
        name=name,
        label=doc.take_text("label", at_most=100),
        role=doc.take_choice("role", Role),
        us=Spread.read(doc.take_child("us")),
    )
    doc.end()
    return column


def _reasons(doc: Document) -> tuple[tuple[str, str], ...]:
    return tuple((name, doc.take_text(name, at_most=2000)) for name in doc.names())


def _number(doc: Document, name: str) -> float:
    value = doc.take_value(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(min(value, MAX_US + 1)):
        doc.refuse(f"{name} is no finite number")
    if not 0 <= value <= MAX_US:
        doc.refuse(f"{name} is {show_value(value)}; allowed: 0 to {MAX_US:g}")
    return float(value)
