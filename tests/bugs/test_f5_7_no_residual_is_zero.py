"""vllm-project/vllm#41972 and #41767.

Symptom: accuracy collapses. Cause: the fused kernel always adds a residual, and the pattern without one handed it a
buffer that nobody had filled.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.bugs.worlds import EPS, HIDDEN, only, open_session, part, plain_world
from tests.forked import run_ranks
from workbench.errors import ArgumentError
from workbench.ops import add_rms_norm
from workbench.ranks import GroupMap


def test_old_whatever_lies_in_the_buffer_is_added() -> None:
    def body(rank: int) -> float:
        with plain_world():
            x = part(rank)
            dist.all_reduce(x)
            left_over = torch.full((1, HIDDEN), 7.0)
            return only(add_rms_norm(x, left_over, torch.ones(HIDDEN), eps=EPS).residual)

    assert run_ranks(2, body) == [18.0] * 2  # right: 11


def test_without_a_residual_the_call_is_refused_and_zeros_add_nothing() -> None:
    def body(rank: int) -> tuple[str, float, float]:
        with open_session(GroupMap.custom({"tp": [[0, 1]]}), "tp") as s:
            with pytest.raises(ArgumentError) as e:
                s.all_reduce_add_rms_norm(part(rank), None, torch.ones(HIDDEN), eps=EPS, group="tp")
            zeros = torch.zeros(1, HIDDEN)
            out = s.all_reduce_add_rms_norm(part(rank), zeros, torch.ones(HIDDEN), eps=EPS, group="tp")
            return str(e.value), only(out.residual), only(s.all_reduce(part(rank), group="tp"))

    for rank, (text, fused_sum, plain_sum) in enumerate(run_ranks(2, body)):
        assert text.startswith(f"tp[0,1] on world rank {rank}: residual ")
        assert (fused_sum, plain_sum) == (11.0, 11.0)
