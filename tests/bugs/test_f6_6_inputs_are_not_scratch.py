"""pytorch/pytorch#76527 and #21480.

Symptom: after a reduce to rank 0, the other ranks hold partial sums where their inputs were. Cause: gloo uses the
buffers as scratch; only the root's is defined afterwards.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.bugs.worlds import fused, only, open_session, part, plain_world
from tests.forked import run_ranks
from workbench.ranks import GroupMap

THREE = GroupMap.custom({"tp": [[0, 1, 2]]})


def test_old_an_input_of_a_rank_that_is_not_the_root_is_overwritten() -> None:
    def body(rank: int) -> list[float]:
        with plain_world():
            x = torch.full((2,), rank + 1.0)
            dist.reduce(x, dst=0)
            return x.tolist()

    root, *others = run_ranks(3, body)
    assert root == [6.0, 6.0]
    assert others != [[2.0, 2.0], [3.0, 3.0]]


def test_every_member_gets_the_sum_and_keeps_its_input() -> None:
    def body(rank: int) -> list[tuple[float, float]]:
        found = []
        for backend in ("shm", "gloo"):
            with open_session(THREE) as s:
                s.prepare("tp", hidden=8, dtype=torch.float32, max_tokens=4, backend=backend)
                x = part(rank)
                found.append((only(s.all_reduce(x, group="tp")), only(x)))
                found.append((only(fused(s, "tp").residual), only(x)))
        return found

    assert run_ranks(3, body) == [[(111.0, 10.0**r), (116.0, 10.0**r)] * 2 for r in range(3)]
