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
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownLine:
    """What `count` lines of a log mean alike; the first of them, and its number from 1."""

    explanation: Explanation
    line: int
    text: str
    count: int = 1

    def to_json(self) -> dict[str, Any]:
        return {"line": self.line, "text": self.text, "count": self.count, **self.explanation.to_json()}

    def __str__(self) -> str:
        more = f", and {self.count - 1} more like it" if self.count > 1 else ""
        return f"line {self.line}{more}: {self.text}\n    {self.explanation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedLog:
    """The known lines of a log in the order in which they first stand there."""

    num_lines: int
    known: tuple[KnownLine, ...]

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "lines": self.num_lines, "known": [k.to_json() for k in self.known]}

    def __str__(self) -> str:
        return "\n".join(map(str, self.known)) or f"none of {self.num_lines} lines is known"


def explain_log(file: str) -> ExplainedLog:
    """Read a log, "-" being stdin. What is no UTF-8 does not matter. Raises OSError."""
    if file == "-":
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr] # a TextIOWrapper but in tests
        return explain_lines(sys.stdin)
    with open(file, encoding="utf-8", errors="replace") as lines:
        return explain_lines(lines)


def explain_lines(lines: Iterable[str]) -> ExplainedLog:
    """What known lines mean: one entry a meaning. Pure."""
    known: dict[str, KnownLine] = {}
    number = 0
    for number, line in enumerate(lines, start=1):
        text = _COLOUR.sub("", line[:_MOST_CHARACTERS]).strip()
        explanation = explain_log_line(text)
        if explanation is None:
            continue
        earlier = known.get(explanation.code)
        if earlier is None:
            known[explanation.code] = KnownLine(explanation=explanation, line=number, text=_shown(text))
        else:
            known[explanation.code] = replace(earlier, count=earlier.count + 1)
    return ExplainedLog(num_lines=number, known=tuple(known.values()))


def _shown(text: str) -> str:
    """The text as a terminal may show it."""
    plain = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return plain if len(plain) <= _SHOWN_CHARACTERS else f"{plain[: _SHOWN_CHARACTERS - 3]}..."
