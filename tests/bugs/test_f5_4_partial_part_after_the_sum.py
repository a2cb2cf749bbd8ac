"""vllm-project/tpu-inference#3435.

Symptom: accuracy falls from 96 to 24 % as the TP inside a replica grows. Cause: the reverse of an early add: the shared
expert's output is still a part of a sum when it is added to the routed output, which is complete.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.bugs.worlds import HIDDEN, only, open_session, plain_world
from tests.forked import run_ranks
from workbench.errors import PartialError
from workbench.ops import Partial, ReduceOver
from workbench.ranks import GroupMap

ROUTED = 50.0  # each rank's part; complete: 100
SHARED = (3.0, 4.0)  # each rank's part; complete: 7


def test_old_each_rank_adds_its_own_part_only() -> None:
    def body(rank: int) -> float:
        with plain_world():
            routed = torch.full((1, HIDDEN), ROUTED)
            dist.all_reduce(routed)
            return only(routed + SHARED[rank])

    assert run_ranks(2, body) == [103.0, 104.0]


def test_a_part_cannot_join_a_complete_tensor_and_reduced_it_counts_whole() -> None:
    def body(rank: int) -> float:
        with open_session(GroupMap.custom({"tp": [[0, 1]]}), "tp") as s:
            routed = s.all_reduce(Partial(torch.full((1, HIDDEN), ROUTED), owed=ReduceOver("tp")))
            shared = Partial(torch.full((1, HIDDEN), SHARED[rank]), owed=ReduceOver("tp"))
            with pytest.raises(PartialError, match="still owes a sum over tp"):
                routed + shared
            return only(routed + s.all_reduce(shared))

    assert run_ranks(2, body) == [107.0] * 2
