"""Whether we got slower: a result beside an earlier one of the same kind of machine."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.errors import ArgumentError
from workbench.trace import Comparison, Role, Row, Scenario, Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Our way at one number of tokens, before and now."""

    scenario: Scenario
    tokens: int
    before: Spread
    now: Spread

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens ({self.scenario.value}): {self.now.median:.2f} us [{self.now.p10:.2f}, "
            f"{self.now.p90:.2f}], before {self.before.median:.2f} us [{self.before.p10:.2f}, {self.before.p90:.2f}]: "
            f"{self.now.median / self.before.median - 1:+.1%}"
        )


def require_same(before: Comparison, **now: object) -> None:
    """Raise ArgumentError unless the baseline's fields equal these: ranks, hidden, dtype, device."""
    for name, mine in now.items():
        theirs = getattr(before, name)
        if mine != theirs:
            raise ArgumentError(f"the baseline has {name} {theirs}, this run {mine}; compare with a run of the same")


def find_losses(now: Comparison, before: Comparison) -> tuple[Loss, ...]:
    """The rows whose time from p10 to p90 lies wholly above that of the baseline: slower by more than both spreads.

    Raises: ArgumentError for a baseline of another device, dtype, hidden size or number of ranks, or without a row of
    the same scenario and tokens.
    """
    require_same(before, ranks=now.ranks, hidden=now.hidden, dtype=now.dtype, device=now.device)
    earlier = {(row.scenario, row.tokens): row for row in before.rows}
    pairs = [(row, earlier[key]) for row in now.rows if (key := (row.scenario, row.tokens)) in earlier]
    if not pairs:
        raise ArgumentError(
            f"the baseline has no row in common with this run: it has {_rows(before)}, this run {_rows(now)}; measure "
            f"the same numbers of tokens"
        )
    found = []
    for row, old in pairs:
        ours, theirs = row.column(Role.OURS), old.column(Role.OURS)
        if ours is not None and theirs is not None and ours.us.p10 > theirs.us.p90:
            found.append(Loss(scenario=row.scenario, tokens=row.tokens, before=theirs.us, now=ours.us))
    return tuple(found)


def _rows(comparison: Comparison) -> str:
    def text(row: Row) -> str:
        return f"{row.tokens} ({row.scenario.value})"

    return ", ".join(text(row) for row in comparison.rows) or "none"
