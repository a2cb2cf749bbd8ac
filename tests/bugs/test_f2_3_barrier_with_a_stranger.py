"""pytorch/pytorch#130102.

Symptom: a barrier lets two ranks of different groups through while their own partners wait for ever. Cause: as 25390:
the lists [0,3] and [1,2], each made by its members only, share one name.
"""

from __future__ import annotations

import torch.distributed as dist

from tests.bugs.worlds import AMPLE, open_session, plain_world
from tests.forked import run_ranks
from workbench.ranks import GroupMap


def test_old_a_barrier_passes_before_the_partner_has_a_group() -> None:
    def body(rank: int) -> str:
        with plain_world() as store:
            if rank in (1, 3):
                store.wait(["passed/0", "passed/2"])
                return "had no group yet"
            group = dist.new_group([0, 3] if rank == 0 else [1, 2], timeout=AMPLE)
            for _ in range(20):
                dist.barrier(group=group)
            store.set(f"passed/{rank}", "")
            return "passed 20 barriers"

    assert run_ranks(4, body) == ["passed 20 barriers", "had no group yet"] * 2


def test_every_member_leaves_a_barrier_and_none_before_its_partner_came() -> None:
    def body(rank: int) -> tuple[int, list[int]]:
        with open_session(GroupMap.custom({"pair": [[0, 3], [1, 2]]})) as s:
            for _ in range(20):
                s.barrier(group="pair")
            return 20, s.gather_object(rank, group="pair")

    assert run_ranks(4, body) == [(20, [0, 3]), (20, [1, 2]), (20, [1, 2]), (20, [0, 3])]
