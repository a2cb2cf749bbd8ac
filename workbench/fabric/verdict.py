"""Verdict: whether something holds, why, and from what that was seen; and how world ranks are named in such texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_MOST_RUNS = 16


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether something can be used, and why. `evidence` holds what each member said, one line a finding."""

    ok: bool
    reason: str
    evidence: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "reason": self.reason, "evidence": list(self.evidence)}

    def __str__(self) -> str:
        return f"{'yes' if self.ok else 'no'}: {self.reason}"


def name_ranks(world_ranks: Iterable[int]) -> str:
    """'world rank 3', 'world ranks 0, 2, 8..15': three and more in a row are drawn together, and a long list is cut."""
    ranks = sorted(set(world_ranks))
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}..{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs[:_MOST_RUNS]]
    cut = sum(len(run) for run in runs[_MOST_RUNS:])
    return f"world rank{'s' if len(ranks) != 1 else ''} {', '.join(parts)}{f' and {cut} more' if cut else ''}"


def name_shares(ranks_by_value: Mapping[str, Iterable[int]]) -> str:
    """'world ranks 0..2: sm90; world rank 3: sm100' from {'sm90': [0, 1, 2], 'sm100': [3]}."""
    return "; ".join(f"{name_ranks(ranks)}: {value}" for value, ranks in ranks_by_value.items())
