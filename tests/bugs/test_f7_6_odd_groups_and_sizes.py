"""pytorch/pytorch#121788.

Symptom: six ranks in two groups of three hang for 1064 elements, not for 300, and only with shared memory switched off.
Cause: in the transport of the GPU library; gloo passes. Kept as a sweep of odd sizes over odd groups.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.bugs.worlds import new_groups, plain_world
from tests.forked import run_ranks
from workbench.ranks import GroupMap
from workbench.runtime import Session

GROUPS = [[0, 2, 4], [1, 3, 5]]
SIZES = (1, 7, 300, 1064, 4099)
EVEN, ODD = 10101.0, 101010.0


def test_plain_gloo_passes() -> None:
    def body(rank: int) -> list[float]:
        sums = []
        with plain_world():
            group = new_groups(*GROUPS)[rank % 2]
            for size in SIZES:
                x = torch.full((size,), 10.0**rank)
                dist.all_reduce(x, group=group)
                sums.append(x.unique().item())
        return sums

    assert run_ranks(6, body) == [[EVEN] * 5, [ODD] * 5] * 3


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_every_size_is_right_on_both_groups(backend: str) -> None:
    def body(rank: int) -> list[float]:
        sums = []
        with Session(GroupMap.custom({"tp": GROUPS}), device="cpu", timeout_s=30) as s:
            for size in SIZES:
                s.prepare("tp", hidden=size, dtype=torch.float32, max_tokens=1, backend=backend)
                sums.append(s.all_reduce(torch.full((1, size), 10.0**rank), group="tp").unique().item())
        return sums

    assert run_ranks(6, body) == [[EVEN] * 5, [ODD] * 5] * 3
