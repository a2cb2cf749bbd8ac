"""Lines of logs that people search for, and what they mean: a kind of finding, what to try, and where to read on."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from workbench.diagnose.finding import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What a line of a log means. `kind` is the finding it most often belongs to; the line alone names no rank."""

    code: str
    kind: Kind
    says: str
    fix: str
    notebook: str

    def to_json(self) -> dict[str, str]:
        """All fields, in a fixed order."""
        return {
            "code": self.code,
            "kind": self.kind.value,
            "says": self.says,
            "fix": self.fix,
            "notebook": self.notebook,
        }

    def __str__(self) -> str:
        return f"{self.kind}: {self.says} Try: {self.fix}. Read on: notebooks/{self.notebook}.ipynb"


def explain_log_line(text: str) -> Explanation | None:
    """What a line of a log, or an exception's text, means; None for one that is not known.

    The first entry of workbench/diagnose/log_lines.json that fits is given.
    """
    return next((explanation for pattern, explanation in _entries() if pattern.search(text)), None)


@cache
def _entries() -> tuple[tuple[re.Pattern[str], Explanation], ...]:
    data = json.loads(files("workbench.diagnose").joinpath("log_lines.json").read_text())
    return tuple(
        (
            re.compile(entry["pattern"]),
            Explanation(
                code=entry["code"],
                kind=Kind(entry["kind"]),
                says=entry["says"],
                fix=entry["try"],
                notebook=entry["notebook"],
            ),
        )
        for entry in data
    )
