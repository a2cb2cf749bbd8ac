"""Worlds for borrowed bugs: plain torch.distributed, where the old behaviour shows, and prepared Sessions.

World rank r contributes 10^r and the residual is 5, so that a sum's digits tell who is missing (0) or doubled (2).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.forked import Outcome
from workbench.ops import FusedOutput
from workbench.ranks import GroupMap
from workbench.runtime import Session

HIDDEN = 8
EPS = 1e-6
RESIDUAL = 5.0
HANG_S = 1.0  # how long a call that is expected to hang may take
AMPLE = timedelta(seconds=20)  # for everything else, whatever the machine is doing


@contextmanager
def plain_world(timeout_s: float = 20.0) -> Iterator[dist.Store]:
    """The default gloo group of plain torch, made with ample time and then given `timeout_s` a call; and its store.

    A rank that is done stays until all are, or a little longer than the timeout: an early exit would turn a peer's hang
    into "connection closed".
    """
    dist.init_process_group("gloo", timeout=AMPLE)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), dist.group.WORLD)
    store = dist.distributed_c10d._get_default_store()
    try:
        yield store
    finally:
        store.set(f"done/{dist.get_rank()}", "")
        keys = [f"done/{r}" for r in range(dist.get_world_size())]
        until = time.monotonic() + timeout_s + 0.5
        while time.monotonic() < until and not store.check(keys):
            time.sleep(0.01)


def new_groups(*lists: Sequence[int]) -> list[dist.ProcessGroup]:
    """The groups of `lists`, made by every rank in the same order, each with an explicit timeout."""
    return [dist.new_group(list(ranks), timeout=AMPLE) for ranks in lists]


def end_after(seconds: float) -> Callable[[Sequence[int]], None]:
    """For run_outcomes(while_running=...): kill the ranks that still run then. See `hung`."""

    def wait(pids: Sequence[int]) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(map(_runs, pids)):
            time.sleep(0.02)
        for pid in filter(_runs, pids):
            os.kill(pid, signal.SIGKILL)

    return wait


def dies_quietly() -> None:
    """In a rank that is expected to abort: keep pytest's report of it out of the output."""
    faulthandler.disable()


def hung(outcome: Outcome) -> bool:
    """Whether `end_after` had to end this rank."""
    return outcome.signal == signal.SIGKILL


def error_name(call: Callable[[], Any]) -> Any:
    """What the call gives, or the name of the exception it raises."""
    try:
        return call()
    except Exception as e:
        return type(e).__name__


def open_session(
    group_map: GroupMap,
    *kinds: str,
    max_tokens: int = 4,
    timeout_s: float = 20,
    check: bool = False,
    trace_dir: object = None,
) -> Session:
    """A session on CPU with each of `kinds` prepared for fp32 rows of HIDDEN."""
    directory = None if trace_dir is None else str(trace_dir)
    session = Session(group_map, device="cpu", timeout_s=timeout_s, check=check, trace_dir=directory)
    for kind in kinds:
        session.prepare(kind, hidden=HIDDEN, dtype=torch.float32, max_tokens=max_tokens)
    return session


def part(world_rank: int, tokens: int = 1) -> torch.Tensor:
    """What a world rank contributes: rows of 10^world_rank."""
    return torch.full((tokens, HIDDEN), 10.0**world_rank)


def fused(session: Session, kind: str, tokens: int = 1) -> FusedOutput:
    """The fused operation over this rank's group of `kind`: 10^r each, residual 5, weight 1."""
    x = part(session.world_rank, tokens)
    return session.all_reduce_add_rms_norm(x, torch.full_like(x, RESIDUAL), torch.ones(HIDDEN), eps=EPS, group=kind)


def only(x: torch.Tensor) -> float:
    """The one value that x holds."""
    (value,) = x.unique().tolist()
    return float(value)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False
