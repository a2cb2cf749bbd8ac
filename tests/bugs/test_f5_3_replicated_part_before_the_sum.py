"""sgl-project/sglang#31475 and #35535.

Symptom: garbage from the first token on. Cause: the output of a shared expert, complete on every rank, is added to the
routed experts' part before a later collective sums both.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.bugs.worlds import EPS, HIDDEN, only, open_session, part, plain_world
from tests.forked import run_ranks
from workbench.errors import PartialError
from workbench.ops import Partial, ReduceOver
from workbench.ranks import GroupMap

SHARED = 5.0


def test_old_the_shared_output_is_summed_over_the_ranks_too() -> None:
    def body(rank: int) -> float:
        with plain_world():
            x = part(rank) + SHARED
            dist.all_reduce(x)
            return only(x)

    assert run_ranks(4, body) == [1131.0] * 4


def test_a_complete_tensor_cannot_join_a_part_and_after_the_reduce_it_counts_once() -> None:
    group_map = GroupMap.build("sglang", tp=4, moe_ep=2)

    def body(rank: int) -> tuple[float, float]:
        with open_session(group_map, "tp") as s:
            routed = Partial(part(rank), owed=ReduceOver("moe_ep", "moe_tp"))
            shared = torch.full((1, HIDDEN), SHARED)
            with pytest.raises(PartialError, match="still owes a sum over moe_ep x moe_tp"):
                shared + routed
            again = Partial(part(rank), owed=ReduceOver("moe_ep", "moe_tp"))
            as_residual = s.all_reduce_add_rms_norm(again, shared, torch.ones(HIDDEN), eps=EPS).residual
            return only(s.all_reduce(routed) + shared), only(as_residual)

    assert run_ranks(4, body) == [(1116.0, 1116.0)] * 4
