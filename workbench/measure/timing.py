"""How a call is timed: variants take turns in one run, back to back within a turn, slowest member counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from workbench.runtime import Session
from workbench.trace import Sample

Variant = tuple[Callable[[], object], Callable[[], object]]
"""(reset, call): reset runs untimed before each round."""


def alternate(
    session: Session, kind: str, variants: Mapping[str, Variant], *, tokens: int, calls: int, rounds: int
) -> list[Sample]:
    """Time every variant in turn (A, B, A, B, ...), one warm call before each round.

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
    samples = []
    for name in variants:
        slowest = [max(member[name][i] for member in everyone) for i in range(rounds)]
        samples.append(
            Sample(
                kind=kind,
                variant=name,
                tokens=tokens,
                median_us=statistics.median(slowest),
                best_us=min(slowest),
                worst_us=max(slowest),
                rounds=rounds,
                calls=calls,
            )
        )
    return samples


def _synchronize(session: Session) -> None:
    if session.device == "cuda":
        torch.cuda.synchronize()
