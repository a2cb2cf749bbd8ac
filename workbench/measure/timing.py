"""How a call is timed: variants take turns in one run, back to back within a turn, slowest member counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from workbench.runtime import Session


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds a call: median over the rounds of the slowest member's mean, with the fastest and slowest round."""

    median_us: float
    best_us: float
    worst_us: float
    rounds: int
    calls: int


def alternate(
    session: Session,
    kind: str,
    variants: Mapping[str, tuple[Callable[[], object], Callable[[], object]]],
    *,
    calls: int,
    rounds: int,
) -> dict[str, Timing]:
    """Time every variant in turn (A, B, A, B, ...). A variant is (reset, call); reset runs untimed before each round.

    Collective: every member of the group of `kind`; the result is the same on each.
    """
    mine: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, (reset, call) in variants.items():
            reset()
            call()
            _synchronize(session)
            session.barrier(group=kind)
            started = time.perf_counter()
            for _ in range(calls):
                call()
            _synchronize(session)
            mine[name].append((time.perf_counter() - started) / calls * 1e6)
    everyone = session.gather_object(mine, group=kind)
    result = {}
    for name in variants:
        slowest = [max(member[name][i] for member in everyone) for i in range(rounds)]
        result[name] = Timing(statistics.median(slowest), min(slowest), max(slowest), rounds, calls)
    return result


def _synchronize(session: Session) -> None:
    if session.device == "cuda":
        torch.cuda.synchronize()
