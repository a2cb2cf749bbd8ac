"""sgl-project/sglang#11632.

Symptom: fusion gives wrong results under DP attention. Cause: there the layer adds, normalises and then communicates,
while the fused kernel communicates, adds and normalises; the two orders were matched as if they were one.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.bugs.worlds import plain_world
from tests.forked import run_ranks
from workbench.errors import PartialError
from workbench.ops import Partial, ReduceOver, add_rms_norm
from workbench.ranks import GroupMap
from workbench.runtime import Session

H = torch.tensor([[1.0, 2.0, 3.0, 4.0]])  # complete on every rank
RESIDUAL = torch.full((1, 4), 10.0)
ADD_NORM_THEN_SHARE = [0.8765, 0.9562, 1.0359, 1.1155]
SUM_THEN_ADD_NORM = [0.6831, 0.8783, 1.0735, 1.2687]
DP_ATTENTION = GroupMap.build("sglang", tp=4, attn_dp=4)


def _rounded(x: torch.Tensor) -> list[float]:
    return [round(v, 4) for v in x.flatten().tolist()]


def test_old_the_kernels_order_on_complete_tensors_counts_each_four_times() -> None:
    def body(rank: int) -> list[float]:
        with plain_world():
            x = H.clone()
            dist.all_reduce(x)
            return _rounded(add_rms_norm(x, RESIDUAL, torch.ones(4), eps=1e-6).norm)

    assert run_ranks(4, body) == [SUM_THEN_ADD_NORM] * 4  # right: ADD_NORM_THEN_SHARE


def test_what_owes_nothing_goes_to_a_group_of_one_and_what_owes_a_sum_cannot_be_normalised_first() -> None:
    def body(rank: int) -> tuple[list[float], list[float]]:
        with Session(DP_ATTENTION, device="cpu", timeout_s=20) as s:
            for kind in ("attention_tp", "tp"):
                s.prepare(kind, hidden=4, dtype=torch.float32, max_tokens=1)
            complete = s.all_reduce_add_rms_norm(H, RESIDUAL, torch.ones(4), eps=1e-6, group="attention_tp")
            owing = Partial(H, owed=ReduceOver("tp"))
            with pytest.raises(PartialError, match="rms_norm on a Partial that still owes a sum over tp"):
                torch.nn.functional.rms_norm(owing, (4,))
            summed = s.all_reduce_add_rms_norm(owing, RESIDUAL, torch.ones(4), eps=1e-6)
            return _rounded(complete.norm), _rounded(summed.norm)

    assert run_ranks(4, body) == [(ADD_NORM_THEN_SHARE, SUM_THEN_ADD_NORM)] * 4
