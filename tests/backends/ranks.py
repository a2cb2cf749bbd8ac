"""A channel for backend tests: the contract of backends.base.Channel over plain gloo, with nothing else of the runtime."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from workbench.backends.base import Request
from workbench.ops import ALL, Rounding
from workbench.ranks import GroupKey


class GlooChannel:
    """gather() through all_gather_object, put into group_rank order."""

    def __init__(self, key: GroupKey, torch_group: dist.ProcessGroup, timeout_s: float) -> None:
        self.key = key
        self.world_rank = dist.get_rank()
        self.torch_group = torch_group
        self.timeout_s = timeout_s

    def gather(self, value: Any) -> list[Any]:
        told: list[Any] = [None] * self.key.size
        dist.all_gather_object(told, (self.world_rank, value), group=self.torch_group)
        by_rank = dict(told)
        return [by_rank[r] for r in self.key.world_ranks]


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
