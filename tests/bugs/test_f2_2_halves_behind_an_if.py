"""pytorch/pytorch#38375.

Symptom: with `new_group` in the branches of an if/else, one for each half of the ranks, a gather dies with a broken
pipe, or gathers from a stranger. Cause: as 25390: both halves make "their first group", which torch gives one name.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.bugs.worlds import AMPLE, open_session, plain_world
from tests.forked import run_ranks
from workbench.ranks import GroupMap


def test_old_who_comes_early_gathers_from_a_rank_of_the_other_half() -> None:
    def body(rank: int) -> list[float] | None:
        with plain_world():
            if rank in (1, 2):
                return None  # they come later
            group = dist.new_group([0, 1] if rank < 2 else [2, 3], timeout=AMPLE)
            told = [torch.zeros(1) for _ in range(2)]
            dist.all_gather(told, torch.tensor([float(rank)]), group=group)
            return [t.item() for t in told]

    assert run_ranks(4, body) == [[0.0, 3.0], None, None, [0.0, 3.0]]  # right: [0, 1] and [2, 3]


def test_each_half_gathers_its_own_ranks() -> None:
    def body(rank: int) -> list[int]:
        with open_session(GroupMap.custom({"half": [[0, 1], [2, 3]]})) as s:
            return s.gather_object(rank, group="half")

    assert run_ranks(4, body) == [[0, 1], [0, 1], [2, 3], [2, 3]]
