"""sgl-project/sglang#37199 (#37187).

Symptom: with DP attention and EP, answers collapse: 0 of 128 right. Cause: the expert layer all-reduces its output, and
the layer's communicator reduce-scatters the same tensor over the same group.
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


@pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor")
def test_old_every_contribution_counts_four_times() -> None:
    def body(rank: int) -> float:
        with plain_world():
            x = part(rank, tokens=4)
            dist.all_reduce(x)
            mine = torch.empty(1, HIDDEN)
            dist.reduce_scatter_tensor(mine, x)
            return only(mine)

    assert run_ranks(4, body) == [4444.0] * 4


def test_the_second_reduce_is_refused_and_the_first_is_right() -> None:
    group_map = GroupMap.build("sglang", tp=4, attn_dp=4, moe_ep=4)

    def body(rank: int) -> float:
        with open_session(group_map, "moe_ep") as s:
            x = Partial(part(rank, tokens=4), owed=ReduceOver("moe_ep"))
            total = s.all_reduce(x)
            zeros, weight = torch.zeros(4, HIDDEN), torch.ones(HIDDEN)
            for again in (lambda: s.all_reduce(x), lambda: s.all_reduce_add_rms_norm(x, zeros, weight, eps=EPS)):
                with pytest.raises(PartialError, match="reduced over moe_ep already; a second reduce would double it"):
                    again()
            return only(total)

    assert run_ranks(4, body) == [1111.0] * 4
