"""What known lines of a log mean: `workbench diagnose --log`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from workbench.diagnose import Explanation, explain_log_line
from workbench.xray.verdict import SCHEMA

_MOST_CHARACTERS = 10_000  # of a line that are looked at
_SHOWN_CHARACTERS = 200
_SHOWN_LINES = 12  # of one meaning
_MOST_VALUES, _SHOWN_VALUES = 64, 8
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_MOMENTS = re.compile(
    r"\b[EWIF]\d{3,4}(?= \d\d:)"  # of glog: severity, month and day
    r"|\b\d{4}-\d\d-\d\d(?=\D)|\b\d\d[/-]\d\d(?= \d\d:)|(?:\b|T)\d\d:\d\d:\d\d(?:[.,]\d+)?Z?"
    r"|\b\d+(?:\.\d+)? ?(?:ms|milliseconds)\b"
    r"|\b[Pp][Ii][Dd][ =:]*\d+|\bfd=\d+|(?<=\w):\d+:\d+(?= \[)|\b0x[0-9a-fA-F]+"
)
"""Times, processes and places in memory: they differ between any two lines, and what a line says does not."""
_WORD = re.compile(r"\[?[\w.:<>=/-]+\]?")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownLine:
    """What `count` lines of a log say in the same words; the first of them, and its number from 1.

    differs: where numbers and addresses in those words are not the same, those that were met, in order.
    """

    explanation: Explanation
    line: int
    text: str
    count: int = 1
    differs: tuple[tuple[str, ...], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "line": self.line,
            "text": self.text,
            "count": self.count,
            "differs": [list(values) for values in self.differs],
            **self.explanation.to_json(),
        }

    def __str__(self) -> str:
        values = "; ".join(_listed(values) for values in self.differs)
        more = f", and {self.count - 1} more like it{f' ({values})' if values else ''}" if self.count > 1 else ""
        return f"line {self.line}{more}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedLog:
    """The known lines of a log in the order in which they first stand there."""

    num_lines: int
    known: tuple[KnownLine, ...]

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "lines": self.num_lines, "known": [k.to_json() for k in self.known]}

    def __str__(self) -> str:
        """Each meaning once, below the lines that have it."""
        told: dict[Explanation, list[KnownLine]] = {}
        for known in self.known:
            told.setdefault(known.explanation, []).append(known)
        lines = []
        for explanation, alike in told.items():
            lines += [str(known) for known in alike[:_SHOWN_LINES]]
            if alike[_SHOWN_LINES:]:
                left = sum(known.count for known in alike[_SHOWN_LINES:])
                lines.append(f"line {alike[_SHOWN_LINES].line} and later: {left} more in other words; --json has them")
            lines.append(f"    {explanation}")
        return "\n".join(lines) or f"none of {self.num_lines} lines is known"


def explain_log(file: str) -> ExplainedLog:
    """Read a log, "-" being stdin. What is no UTF-8 does not matter. Raises OSError."""
    if file == "-":
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr] # a TextIOWrapper but in tests
        return explain_lines(sys.stdin)
    with open(file, encoding="utf-8", errors="replace") as lines:
        return explain_lines(lines)


def explain_lines(lines: Iterable[str]) -> ExplainedLog:
    """What known lines mean: one entry for those of one meaning that say it in the same words. Pure."""
    known: dict[tuple[Explanation, str], KnownLine] = {}
    values: dict[tuple[Explanation, str], list[dict[str, None]]] = {}
    number = 0
    for number, line in enumerate(lines, start=1):
        text = _COLOUR.sub("", line[:_MOST_CHARACTERS]).strip()
        explanation = explain_log_line(text)
        if explanation is None:
            continue
        wording, found = _take_apart(text)
        key = explanation, wording
        if key not in known:
            known[key] = KnownLine(explanation=explanation, line=number, text=_shown(text))
            values[key] = [{value: None} for value in found]
            continue
        known[key] = replace(known[key], count=known[key].count + 1)
        for met, value in zip(values[key], found, strict=True):
            if len(met) < _MOST_VALUES:
                met[value] = None
    return ExplainedLog(
        num_lines=number, known=tuple(replace(k, differs=_differing(values[key])) for key, k in known.items())
    )


def _take_apart(text: str) -> tuple[str, list[str]]:
    """A line without its words that have digits, such as ranks, addresses and sizes, and those.

    A number that stands alone is given with the word before it.
    """
    found: list[str] = []
    before = ""

    def take(match: re.Match[str]) -> str:
        nonlocal before
        word, earlier = match[0], before
        before = word
        if not any(map(str.isdigit, word)):
            return word
        value = word.rstrip(".:")
        found.append(_shown(f"{earlier} {value}".strip() if value.isdigit() else value))
        return "#"

    return _WORD.sub(take, _MOMENTS.sub("~", text)), found


def _differing(values: list[dict[str, None]]) -> tuple[tuple[str, ...], ...]:
    """Of each place where values differ all of them; a number that stands in a line twice is told once."""
    differing: dict[tuple[str, ...], tuple[str, ...]] = {}
    for met in values:
        if len(met) > 1:
            differing.setdefault(tuple(re.sub(r"[^\d.:]", "", value) for value in met), tuple(met))
    return tuple(differing.values())


def _listed(values: tuple[str, ...]) -> str:
    return ", ".join(values[:_SHOWN_VALUES]) + (", ..." if len(values) > _SHOWN_VALUES else "")


def _shown(text: str) -> str:
    """The text as a terminal may show it."""
    plain = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return plain if len(plain) <= _SHOWN_CHARACTERS else f"{plain[: _SHOWN_CHARACTERS - 3]}..."
