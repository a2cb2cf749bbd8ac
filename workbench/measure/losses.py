"""Whether we got slower: a result beside an earlier one of the same kind of machine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from workbench.errors import ArgumentError
from workbench.trace import Column, Comparison, Role, Row, Scenario, Spread

Place = tuple[Scenario, int]
"""A row by its scenario and number of tokens."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """What became slower by more than the spread of both runs.

    ours: while a peer timed beside it did not, so it is us.   shared: and every such peer as well, at least as much, so
    it is the machine.   compared: rows in which our way was timed both times.
    """

    ours: tuple[Loss, ...]
    shared: tuple[Loss, ...]
    compared: int


def require_same(
    before: Comparison, *, places: Collection[Place], about: Mapping[str, Any] | None = None, **fields: object
) -> None:
    """Raise ArgumentError unless a run of these fields, scenarios and tokens can be compared with the baseline.

    about: the method, such as `calls`; what the baseline does not tell is taken as equal.
    """
    for name, mine in fields.items():
        theirs = getattr(before, name)
        if mine != theirs:
            raise ArgumentError(f"the baseline has {name} {theirs}, this run {mine}; compare with a run of the same")
    for name, mine in (about or {}).items():
        theirs = before.about.get(name, mine)
        if mine != theirs:
            raise ArgumentError(f"the baseline was timed with {name} {theirs}, this run {mine}; use the same")
    if not any(place in places for place in _timed(before)):
        raise ArgumentError(
            f"the baseline has no row in common with this run: it has {_told(_timed(before))}, this run "
            f"{_told(places)}; measure the same numbers of tokens"
        )


def find_losses(now: Comparison, before: Comparison) -> Losses:
    """Compare row by row; a time counts as slower if all of it from p10 to p90 lies above that of the baseline.

    Our way was timed twice in each run where there is a second time; both must be slower. What the machine did to every
    peer is no loss of ours.
    Raises: ArgumentError for a baseline of another device, dtype, hidden size or number of ranks, or without our time
    in a row of the same scenario and tokens.
    """
    same = {name: getattr(now, name) for name in ("ranks", "hidden", "dtype", "device")}
    require_same(before, places=[(row.scenario, row.tokens) for row in now.rows], **same)
    earlier = _timed(before)
    found: dict[bool, list[Loss]] = {True: [], False: []}
    compared = 0
    for place, row in _timed(now).items():
        if (old := earlier.get(place)) is None:
            continue
        compared += 1
        slowdown = _slowdown(_ours(row), _ours(old))
        peers = [_slowdown([c], [o]) for c in row.columns if (o := _peer(old, c)) is not None]
        if slowdown > 1:
            loss = Loss(scenario=row.scenario, tokens=row.tokens, before=_ours(old)[0].us, now=_ours(row)[0].us)
            found[bool(peers) and slowdown <= min(peers)].append(loss)
    return Losses(ours=tuple(found[False]), shared=tuple(found[True]), compared=compared)


def _timed(comparison: Comparison) -> dict[Place, Row]:
    """The rows in which our way took time, by place."""
    timed = (row for row in comparison.rows if min((c.us.p10 for c in _ours(row)), default=0.0) > 0)
    return {(row.scenario, row.tokens): row for row in timed}


def _ours(row: Row) -> list[Column]:
    """Our way, and its second time; nothing if it is not there."""
    first = row.column(Role.OURS)
    return [] if first is None else [first, *(c for c in row.columns if c.role is Role.AGAIN)]


def _peer(row: Row, like: Column) -> Column | None:
    """The row's column of that peer, if both took time."""
    found = row.named(like.name) if like.role is Role.PEER else None
    return found if found is not None and found.role is Role.PEER and min(found.us.p10, like.us.p10) > 0 else None


def _slowdown(now: list[Column], before: list[Column]) -> float:
    """How much slower it became for certain: the least p10 now over the largest p90 before."""
    return min(c.us.p10 for c in now) / max(c.us.p90 for c in before)


def _told(places: Collection[Place]) -> str:
    return ", ".join(f"{tokens} ({scenario.value})" for scenario, tokens in places) or "none"
