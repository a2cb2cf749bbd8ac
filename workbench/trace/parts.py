"""Parts: how much one rank of an all-to-all sends to each member and takes from each, as words of its call's note."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

_MOST_CHARACTERS = 1024
_WORDS = re.compile(r"sends (?P<sends>[\d,x]*); takes (?P<takes>[\d,x]*)(?:;|$)")


@dataclass(frozen=True, slots=True)
class Parts:
    """What one rank sends and takes, in order of the group's members. Units: elements."""

    sends: tuple[int, ...]
    takes: tuple[int, ...]

    @classmethod
    def parse(cls, note: str) -> Parts | None:
        """What a note says of parts; None if it says nothing, or something else."""
        found = _WORDS.search(note)
        try:
            return None if found is None else cls(_numbers(found["sends"]), _numbers(found["takes"]))
        except ValueError:
            return None

    def __str__(self) -> str:
        """'sends 12,8x3; takes 20x4', 8x3 being three eights; '' where that is longer than a note should be."""
        text = f"sends {_text(self.sends)}; takes {_text(self.takes)}"
        return text if len(text) <= _MOST_CHARACTERS else ""


def _text(numbers: Sequence[int]) -> str:
    runs = ((number, len(list(run))) for number, run in groupby(numbers))
    return ",".join(str(number) if length == 1 else f"{number}x{length}" for number, length in runs)


def _numbers(text: str) -> tuple[int, ...]:
    """Raises ValueError for what `_text` does not write."""
    found: list[int] = []
    for run in text.split(",") if text else ():
        number, _, length = run.partition("x")
        if len(found) + int(length or 1) > _MOST_CHARACTERS * 64:  # a file may hold any number
            raise ValueError(f"{run} stands for more members than any group has")
        found += [int(number)] * int(length or 1)
    return tuple(found)
