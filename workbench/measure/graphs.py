"""Timing on GPUs: a CUDA graph of many calls, replayed, with device events around one, another queued ahead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from workbench.measure.case import Case, together
from workbench.measure.timing import Meeting, Round


@dataclass(frozen=True, slots=True)
class Recorded:
    """A graph of `calls` calls, and what the last of them gave."""

    graph: torch.cuda.CUDAGraph
    calls: int
    given: Any


def record(meeting: Meeting, case: Case, call: Callable[[], Any], calls: int) -> Recorded:
    """Capture `calls` calls of `call`, which does case's work, after two outside the graph where the case allows it.

    Collective. Raises: CaseFailedError, alike on every rank.
    """
    if case.eager:
        together(meeting, "warm-up", lambda: (call(), call()))
    graph = torch.cuda.CUDAGraph()

    def capture() -> Any:
        # thread_local: NCCL's watchdog asks after its events meanwhile, which "global" would call an error
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(calls):
                given = call()
        return given

    given = together(meeting, "capture", capture)
    if case.after_capture is not None:
        together(meeting, "registration after the capture", case.after_capture)
    return Recorded(graph, calls, given)


def graph_round(meeting: Meeting, recorded: Recorded, load: Callable[[], object]) -> Round:
    """Times one replay by events of the device; another replay is queued ahead, so no launch is waited for."""

    def once() -> float:
        load()
        meeting.meet()
        recorded.graph.replay()
        return _device_us(recorded.graph.replay) / recorded.calls

    return once


def record_delay(cycles: int, calls: int) -> Recorded:
    """A graph of `calls` waits of so many device cycles. Local."""
    wait_cycles(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            wait_cycles(cycles)
    return Recorded(graph, calls, None)


def cycles_of(delay_us: float) -> int:
    """Device cycles that last about `delay_us`. Local; waits for the device."""
    probe = 2_000_000
    wait_cycles(probe)
    return max(1, int(probe * delay_us / _device_us(lambda: wait_cycles(probe))))


def wait_cycles(cycles: int) -> None:
    """A kernel that does nothing for so many device cycles. Local."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call] # torch has no types here


def _device_us(launch: Callable[[], object]) -> float:
    """Microseconds of the device from before to after what launch() puts on the stream."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call] # likewise
    before.record()
    launch()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after) * 1e3)
