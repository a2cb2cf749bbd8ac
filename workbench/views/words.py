"""Numbers and ranks in words, alike in figures, tables and text twins."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def ranks_text(world_ranks: Sequence[int]) -> str:
    """ "0..7" for neighbours, "0..56 step 8" for equal steps, else the ranks; at most eight of them are spelt out."""
    ranks = list(world_ranks)
    steps = {b - a for a, b in pairwise(ranks)}
    if len(ranks) > 2 and len(steps) == 1:
        step = steps.pop()
        if step:
            return f"{ranks[0]}..{ranks[-1]}" + ("" if step == 1 else f" step {step}")
    if len(ranks) > 8:
        return f"{','.join(map(str, ranks[:6]))},...,{ranks[-1]} ({len(ranks)} ranks)"
    return ",".join(map(str, ranks))


def who(world_ranks: Sequence[int]) -> str:
    """ "rank 3" or "ranks 3,5"."""
    return f"rank{'' if len(world_ranks) == 1 else 's'} {ranks_text(world_ranks)}"


def time_unit(span_ns: int) -> tuple[str, float]:
    """The unit in which a span reads well, and its length in ns."""
    if span_ns < 1_000_000:
        return "µs", 1e3
    if span_ns < 1_000_000_000:
        return "ms", 1e6
    return "s", 1e9


def time_text(span_ns: float) -> str:
    """A span with its unit and three significant digits: "35 µs", "1.25 ms", "12 s"."""
    unit, size = time_unit(int(span_ns))
    return f"{float(f'{span_ns / size:.3g}'):g} {unit}"
