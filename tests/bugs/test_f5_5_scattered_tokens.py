"""sgl-project/sglang#19918.

Symptom: garbage when dense layers run with a TP of 1, and a crash in warm-up when the tokens do not divide by the
group. Cause: in that mode every rank holds other tokens, complete, and the fusion gate took them for parts of one sum;
and a reduce-scatter needs a multiple of the group's size.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.bugs.worlds import HIDDEN, error_name, fused, only, open_session, part, plain_world
from tests.forked import run_ranks
from workbench.ranks import GroupMap

LAYOUT = GroupMap.custom({"tp": [[0, 1, 2, 3]], "dense_tp": [[0], [1], [2], [3]]})


def test_old_tokens_of_different_ranks_are_summed() -> None:
    def body(rank: int) -> float:
        with plain_world():
            x = part(rank)  # this rank's own token
            dist.all_reduce(x)
            return only(x) + 5

    assert run_ranks(4, body) == [1116.0] * 4  # right: 6, 15, 105, 1005


def test_scattered_tokens_owe_their_sum_to_a_group_of_one_which_keeps_them_apart() -> None:
    def body(rank: int) -> tuple[str, float, float]:
        with open_session(LAYOUT, "tp", "dense_tp") as s:
            scattered, full = fused(s, "dense_tp").residual, fused(s, "tp").residual
            return s.why("dense_tp").choice, only(scattered), only(full)

    assert run_ranks(4, body) == [("alone", own, 1116.0) for own in (6.0, 15.0, 105.0, 1005.0)]


@pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor")
def test_old_97_tokens_cannot_be_scattered_over_eight_ranks_and_104_can() -> None:
    def body(rank: int) -> tuple[object, float]:
        with plain_world():
            refused = error_name(
                lambda: dist.reduce_scatter_tensor(torch.empty(97 // 8, HIDDEN), torch.ones(97, HIDDEN))
            )
            padded, mine = torch.zeros(104, HIDDEN), torch.empty(13, HIDDEN)
            padded[:97] = 1
            dist.reduce_scatter_tensor(mine, padded)
            return refused, mine[0, 0].item()

    assert run_ranks(8, body) == [("RuntimeError", 8.0)] * 8


def test_97_tokens_need_no_padding_here() -> None:
    def body(rank: int) -> float:
        with open_session(GroupMap.custom({"tp": [list(range(8))]}), "tp", max_tokens=97) as s:
            return only(fused(s, "tp", tokens=97).residual)

    assert run_ranks(8, body) == [11111116.0] * 8
