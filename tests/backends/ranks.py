"""A channel for backend tests: the contract of backends.base.Channel over plain gloo, without the runtime."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests import forked
from workbench.backends.base import Request
from workbench.backends.busy import Busy
from workbench.errors import CallFailedError
from workbench.ops import ALL, Rounding
from workbench.ranks import GroupKey
from workbench.runtime.story import Story


def run_outcomes(
    num_ranks: int,
    fn: Callable[[int], Any],
    *,
    timeout_s: float = 60.0,
    while_running: Callable[[Sequence[int]], None] = lambda _pids: None,
) -> list[forked.Outcome]:
    """forked.run_outcomes, with ranks that start only when all are forked.

    A rank that connects while the parent still forks makes the store's thread in the parent take a lock of the C
    library; the next child inherits it locked and hangs.
    """
    read_end, write_end = os.pipe()

    def gated(rank: int) -> Any:
        os.close(write_end)
        os.read(read_end, 1)  # end of file once the parent and all siblings closed their copy
        return fn(rank)

    def release(pids: Sequence[int]) -> None:
        os.close(write_end)
        while_running(pids)

    try:
        return forked.run_outcomes(num_ranks, gated, timeout_s=timeout_s, while_running=release)
    finally:
        os.close(read_end)


def run_ranks(num_ranks: int, fn: Callable[[int], Any], *, timeout_s: float = 60.0) -> list[Any]:
    """The values of fn(rank) in rank order; an AssertionError with the traceback of each rank that failed."""
    outcomes = run_outcomes(num_ranks, fn, timeout_s=timeout_s)
    bad = [o for o in outcomes if o.error is not None or o.signal]
    assert not bad, "\n".join(f"rank {o.rank}: signal {o.signal} {o.error!r}\n{o.trace}" for o in bad)
    return [o.value for o in outcomes]


class GlooChannel:
    """gather() through all_gather_object, put into group_rank order."""

    def __init__(self, key: GroupKey, torch_group: dist.ProcessGroup, timeout_s: float) -> None:
        self.key = key
        self.world_rank = dist.get_rank()
        self.torch_group = torch_group
        self.busy = Busy(str(key))
        self.timeout_s = timeout_s
        self._story = Story(dist.distributed_c10d._get_default_store(), f"story of {key}")

    def gather(self, value: Any, *, what: str, held: bool = False) -> list[Any]:  # noqa: ARG002 - as every channel
        told: list[Any] = [None] * self.key.size
        dist.all_gather_object(told, (self.world_rank, value), group=self.torch_group)
        by_rank = dict(told)
        return [by_rank[r] for r in self.key.world_ranks]

    def fail(self, what: str, error: Exception) -> Exception:
        return self._story.tell(CallFailedError.arose(self.key, what, self.world_rank, error))

    def story(self) -> Exception | None:
        return self._story.read()


@contextmanager
def channels(*groups: tuple[int, ...], timeout_s: float = 30.0) -> Iterator[list[GlooChannel]]:
    """Channels of the groups this rank belongs to, in the order given. Collective over the world."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        made = []
        for group in groups:
            torch_group = dist.new_group(list(group), timeout=timedelta(seconds=60))
            if dist.get_rank() in group:
                made.append(GlooChannel(GroupKey("tp", group), torch_group, timeout_s))
        dist.barrier()  # a rank that leaves while others still connect would close their connections
        yield made
    finally:
        dist.destroy_process_group()


def request(
    hidden: int,
    dtype: torch.dtype = torch.bfloat16,
    max_tokens: int = 64,
    rounding: Rounding = Rounding.ONCE,
) -> Request:
    return Request(hidden=hidden, dtype=dtype, max_tokens=max_tokens, ops=ALL, rounding=rounding)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The tensor as integers, so that equality means equal bits (-0.0, NaN)."""
    return x.view({2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


def data(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal values, the same on every rank for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
