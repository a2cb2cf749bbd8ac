"""vllm-project/vllm#45917.

Symptom: TP2 x DP2 freezes in warm-up, where TP alone and DP alone start. Cause: the fused workspace was created without
a group, so its rendezvous took all ranks, while the replicas come to it at different times or not at all.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.bugs.worlds import HANG_S, error_name, fused, new_groups, only, open_session, part, plain_world
from tests.forked import run_ranks
from workbench.ranks import GroupMap


def test_old_the_replica_that_creates_its_workspace_waits_for_the_other_one() -> None:
    def body(rank: int) -> object:
        with plain_world(HANG_S):
            tp = new_groups([0, 1], [2, 3])[rank // 2]

            def create_workspace() -> list[str]:
                handles = [""] * 4
                dist.all_gather_object(handles, f"handle of {rank}")  # no group=
                return handles

            def run_step() -> float:
                x = part(rank)
                dist.all_reduce(x, group=tp)
                return only(x)

            return error_name(create_workspace if rank < 2 else run_step)

    assert run_ranks(4, body) == ["RuntimeError", "RuntimeError", 1100.0, 1100.0]


def test_a_replica_prepares_alone_while_the_other_is_elsewhere() -> None:
    group_map = GroupMap.build("vllm", tp=2, dp=2)
    assert group_map.groups["tp"] == ((0, 1), (2, 3))

    def body(rank: int) -> tuple[float, float]:
        with open_session(group_map) as s:
            if rank >= 2:
                s.gather_object("a step of the second replica", group="tp")
            else:
                s.prepare("tp", hidden=8, dtype=torch.float32, max_tokens=4)
            first = only(fused(s, "tp").residual) if rank < 2 else 0.0
            if rank >= 2:
                s.prepare("tp", hidden=8, dtype=torch.float32, max_tokens=4)
            return first, only(fused(s, "tp").residual)

    assert run_ranks(4, body) == [(16.0, 16.0)] * 2 + [(0.0, 1105.0)] * 2
