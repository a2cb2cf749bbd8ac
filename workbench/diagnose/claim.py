"""Claim: what a rule says before the rules are heard together. Only its finding leaves the room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from workbench.diagnose.finding import Finding
from workbench.diagnose.scene import Scene


class Weight(IntEnum):
    """How near to the first cause a claim can be, whatever its time."""

    CAUSE = 0
    REMARK = 1  # would be a cause, were nothing else found
    SYMPTOM = 2
    ALONE = 3  # told only where nothing else is
    BESIDE = 4  # told only where something else is: the program got over it


@dataclass(frozen=True, slots=True)
class Claim:
    """A finding, and when the fault was made. Units: ns on the trace's clock.

    `line` is the call at fault, as words; claims of one code about one line, on groups
    that share no rank, are one fault.
    """

    finding: Finding
    time_ns: int
    weight: Weight = Weight.CAUSE
    line: str = ""


Rule = Callable[[Scene], Iterator[Claim]]
