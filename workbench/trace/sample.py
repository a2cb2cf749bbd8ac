"""Sample: one measured time, with its spread and what was timed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Microseconds a call of one variant on the groups of one kind: median of the rounds, fastest and slowest round.

    Each round's time is that of the slowest member. `calls` back to back a round.
    """

    kind: str
    variant: str
    tokens: int
    median_us: float
    best_us: float
    worst_us: float
    rounds: int
    calls: int

    def to_json(self) -> dict[str, Any]:
        """The fields, JSON-able."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Sample:
        """What to_json gave."""
        return cls(**data)


def tell_crowding(ranks: int, places: int, what: str = "core") -> str:
    """What times of more ranks than cores or GPUs are worth, in words; "" where each rank has its own."""
    if ranks <= places:
        return ""
    shared = f"one {what}" if places == 1 else f"{places} {what}s"
    return f"{ranks} ranks share {shared}: times are noise, and ratios vary between runs"
