"""How calls are timed: ways take turns in one run, back to back within a turn, and the slowest rank counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from workbench.runtime import Session
from workbench.trace import Sample

Variant = tuple[Callable[[], object], Callable[[], object]]
"""(reset, call): reset runs untimed before each round."""

Round = Callable[[], Any]
"""Times one way once on this rank: microseconds a call, or what `merge` of time_rounds makes them from."""


class Meeting(Protocol):
    """How the ranks that time together meet. Both methods are collective."""

    device: str

    def meet(self) -> None:
        """Wait for this rank's device, then for every rank."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON value."""
        ...


class SessionMeeting:
    """The members of one group of a session."""

    def __init__(self, session: Session, kind: str) -> None:
        self._session, self._kind, self.device = session, kind, session.device

    def meet(self) -> None:
        synchronize(self._session.device)
        self._session.barrier(group=self._kind)

    def gather(self, value: Any) -> list[Any]:
        return self._session.gather_object(value, group=self._kind)


def time_rounds(
    meeting: Meeting,
    rounds: Mapping[str, Round],
    *,
    num_rounds: int,
    merge: Callable[[list[Any]], float] = max,
) -> dict[str, list[float]]:
    """Microseconds a call of every way in every round, A, B, A, B, ...; merge: of the ranks' values, the slowest.

    Collective: every rank of the meeting, with the same names; the result is the same on each.
    """
    mine: dict[str, list[Any]] = {name: [] for name in rounds}
    for _ in range(num_rounds):
        for name, once in rounds.items():
            mine[name].append(once())
    everyone = meeting.gather(mine)
    return {name: [merge([member[name][i] for member in everyone]) for i in range(num_rounds)] for name in rounds}


def host_round(meeting: Meeting, variant: Variant, *, calls: int) -> Round:
    """Times `calls` calls by the host's clock, after one warm call."""
    reset, call = variant

    def once() -> float:
        reset()
        call()
        meeting.meet()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize(meeting.device)
        return (time.perf_counter() - started) / calls * 1e6

    return once


def skewed_host_round(meeting: Meeting, variant: Variant, *, calls: int, delay_us: float) -> Round:
    """Gives (arrival, end) of each call in nanoseconds of the host's clock; this rank arrives `delay_us` late.

    Ranks of one host only: their clock is one. Merge with `from_last_arrival`.
    """
    reset, call = variant

    def once() -> list[tuple[int, int]]:
        reset()
        call()
        seen = []
        for _ in range(calls):
            meeting.meet()
            start = time.perf_counter_ns() + int(delay_us * 1e3)
            while time.perf_counter_ns() < start:
                pass
            arrival = time.perf_counter_ns()
            call()
            synchronize(meeting.device)
            seen.append((arrival, time.perf_counter_ns()))
        return seen

    return once


def from_last_arrival(ranks: list[Any]) -> float:
    """Of every rank's (arrival, end) of each call: microseconds from the last arrival to the last end, median."""
    calls = zip(*ranks, strict=True)
    return float(statistics.median((max(e for _, e in call) - max(a for a, _ in call)) / 1e3 for call in calls))


def alternate(
    session: Session, kind: str, variants: Mapping[str, Variant], *, tokens: int, calls: int, rounds: int
) -> list[Sample]:
    """Time every variant in turn on the group of `kind`, by the host's clock.

    Collective: every member of the group of `kind`; the result is the same on each.
    """
    meeting = SessionMeeting(session, kind)
    timed = {name: host_round(meeting, v, calls=calls) for name, v in variants.items()}
    return [
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
        for name, slowest in time_rounds(meeting, timed, num_rounds=rounds).items()
    ]


def synchronize(device: str) -> None:
    """Wait for the GPU, if the ranks have one."""
    if device == "cuda":
        torch.cuda.synchronize()
