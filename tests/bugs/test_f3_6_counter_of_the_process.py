"""pytorch/pytorch#196082 (repair proposed in PR 196350).

Symptom: a rendezvous in a subgroup, then one in a larger group: the second hangs. Cause: the keys of the store were
numbered by a counter of the process, and not of the group, so members of the larger group look under different keys.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from tests.bugs.worlds import fused, only, open_session, plain_world
from tests.forked import run_ranks
from workbench.ranks import GroupMap


def test_old_after_a_subgroup_the_larger_group_waits_under_two_different_numbers() -> None:
    def body(rank: int) -> str:
        with plain_world() as store:
            made = 0

            def exchange(members: list[int]) -> list[bytes]:
                nonlocal made
                number, made = made, made + 1
                keys = [f"exchange/{len(members)}/{number}/{m}" for m in members]
                store.set(f"exchange/{len(members)}/{number}/{rank}", "handle")
                store.wait(keys, timedelta(seconds=1))
                return [store.get(key) for key in keys]

            if rank < 2:
                exchange([0, 1])
            try:
                exchange([0, 1, 2])
            except dist.DistStoreError as e:
                return str(e).rpartition("keys: ")[2].split("exchange/")[1].split("/")[1]
            return "met"

    assert run_ranks(3, body) == ["1", "1", "0"]  # the numbers they wait under


def test_exchanges_of_a_group_are_counted_in_the_group() -> None:
    group_map = GroupMap.custom({"pair": [[0, 1]], "all": [[0, 1, 2]]})

    def body(rank: int) -> tuple[list[int], float]:
        with open_session(group_map) as s:
            if rank < 2:
                for _ in range(3):
                    s.gather_object(rank, group="pair")
            told = s.gather_object(rank, group="all")
        with open_session(group_map, *(("pair", "all") if rank < 2 else ("all",))) as s:
            if rank < 2:
                fused(s, "pair")
            return told, only(fused(s, "all").residual)

    assert run_ranks(3, body) == [([0, 1, 2], 116.0)] * 3
