"""mirage-project/mirage#722.

Symptom: outputs drift from those of one GPU, everywhere alike. Cause: every rank adds the residual to its part before
the all-reduce, so that it is counted once a rank.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.bugs.worlds import EPS, HIDDEN, RESIDUAL, fused, only, open_session, part, plain_world
from tests.forked import run_ranks
from workbench.errors import PartialError
from workbench.ops import Partial, ReduceOver
from workbench.ranks import GroupMap

FOUR = GroupMap.custom({"tp": [[0, 1, 2, 3]]})


def test_old_the_residual_is_counted_four_times() -> None:
    def body(rank: int) -> float:
        with plain_world():
            x = part(rank) + RESIDUAL
            dist.all_reduce(x)
            return only(x)

    assert run_ranks(4, body) == [1131.0] * 4


def test_the_fused_op_counts_it_once() -> None:
    def body(rank: int) -> float:
        with open_session(FOUR, "tp") as s:
            return only(fused(s, "tp").residual)

    assert run_ranks(4, body) == [1116.0] * 4


def test_a_residual_cannot_be_added_to_a_part_of_a_sum() -> None:
    def body(rank: int) -> float:
        with open_session(FOUR, "tp") as s:
            x, residual = Partial(part(rank), owed=ReduceOver("tp")), torch.full((1, HIDDEN), RESIDUAL)
            with pytest.raises(PartialError, match="add on a Partial that still owes a sum over tp"):
                x + residual
            return only(s.all_reduce_add_rms_norm(x, residual, torch.ones(HIDDEN), eps=EPS).residual)

    assert run_ranks(4, body) == [1116.0] * 4
