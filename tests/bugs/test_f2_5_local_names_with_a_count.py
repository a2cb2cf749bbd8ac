"""pytorch/pytorch#173608.

Symptom: a group made with `use_local_synchronization` hangs once its members have made different numbers of groups
before, such as an embedding group of the first and last pipeline stage. Cause: the name is a hash of the members salted
with a count that each process keeps for itself.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from tests.bugs.worlds import AMPLE, HANG_S, fused, only, open_session, plain_world
from tests.forked import run_ranks
from workbench.ranks import GroupMap

EMBEDDING = [0, 3]
STAGES = [[0, 1], [2, 3]]


def test_old_every_rank_waits_in_a_group_of_its_own_name() -> None:
    def body(rank: int) -> str:
        with plain_world():
            if rank in EMBEDDING:
                dist.new_group(EMBEDDING, timeout=AMPLE, use_local_synchronization=True)
            try:
                dist.new_group(STAGES[rank // 2], timeout=timedelta(seconds=HANG_S), use_local_synchronization=True)
            except dist.DistStoreError as e:
                return str(e).rpartition("keys: ")[2]
            return "made"

    waited_for = run_ranks(4, body)
    assert len(set(waited_for)) == 4  # four keys, and nobody writes any of them
    assert "made" not in waited_for


def test_overlapping_groups_whose_members_make_different_numbers_of_them_are_right() -> None:
    group_map = GroupMap.custom({"embedding": [EMBEDDING], "tp": STAGES})

    def body(rank: int) -> tuple[float | None, float]:
        kinds = ("embedding", "tp") if rank in EMBEDDING else ("tp",)
        with open_session(group_map, *kinds) as s:
            ends = only(fused(s, "embedding").residual) if rank in EMBEDDING else None
            return ends, only(fused(s, "tp").residual)

    assert run_ranks(4, body) == [(1006.0, 16.0), (None, 16.0), (None, 1105.0), (1006.0, 1105.0)]
