"""Lines of logs that people search for, and what they mean: a kind of finding, what to try, and where to read on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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

    The first entry of workbench/diagnose/log_lines.json that fits is given; numbers that its pattern names are told
    in words.
    """
    for pattern, explanation in _entries():
        found = pattern.search(text)
        if found is not None:
            return _with_numbers(explanation, {name: int(digits) for name, digits in found.groupdict().items()})
    return None


def _with_numbers(explanation: Explanation, numbers: Mapping[str, int]) -> Explanation:
    words = _NUMBERS_IN_WORDS.get(explanation.code)
    return explanation if words is None else replace(explanation, says=explanation.says.format(told=words(numbers)))


def _clients(numbers: Mapping[str, int]) -> str:
    missing, clients = numbers["clients"] - numbers["joined"], numbers["clients"]
    return f"{missing} of {clients} did not join the job's store at its start, within {numbers['seconds']} s."


def _status(numbers: Mapping[str, int]) -> str:
    enqueued, completed = max(numbers["enqueued"], 0), max(numbers["completed"], 0)
    if completed > enqueued:
        return f"The numbers do not fit together: {completed} calls done, and {enqueued} enqueued."
    if completed == enqueued:
        return (
            f"This rank has finished all {enqueued} calls that it enqueued, and waits for none: if another rank of the "
            f"group has enqueued more, it waits for this one in call {enqueued + 1}."
        )
    calls = f"calls {completed + 1} to {enqueued}" if enqueued > completed + 1 else f"call {enqueued}"
    return (
        f"This rank has enqueued {calls} and not finished {'them' if enqueued > completed + 1 else 'it'}: it came to "
        f"call {completed + 1}, which hangs, and is a victim unless it came with another shape or another operation."
    )


_NUMBERS_IN_WORDS: dict[str, Callable[[Mapping[str, int]], str]] = {"store-clients": _clients, "nccl-status": _status}
"""By code, the sentence that stands for {told} in an entry."""


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
