"""NVIDIA/Megatron-LM#5337.

Symptom: a result that was never reduced, and no error. Cause: an all-reduce in place on `x.contiguous()`, which for a
transposed tensor is a temporary copy; the caller keeps the original.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.bugs.worlds import plain_world
from tests.forked import run_ranks
from workbench.errors import ArgumentError
from workbench.ranks import GroupMap
from workbench.runtime import Session


def _transposed() -> torch.Tensor:
    return torch.arange(6.0).view(2, 3).t()


def test_old_the_transposed_tensor_comes_back_as_it_was() -> None:
    def reduce_in_place(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x.contiguous())
        return x

    def body(rank: int) -> list[list[float]]:
        with plain_world():
            return reduce_in_place(_transposed()).tolist()

    assert run_ranks(2, body) == [[[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]] * 2


def test_the_sum_is_a_fresh_tensor_and_a_transposed_input_is_refused_with_what_to_do() -> None:
    def body(rank: int) -> tuple[str, list[list[float]], list[list[float]]]:
        with Session(GroupMap.custom({"tp": [[0, 1]]}), device="cpu", timeout_s=20) as s:
            s.prepare("tp", hidden=2, dtype=torch.float32, max_tokens=3)
            x = _transposed()
            with pytest.raises(ArgumentError) as e:
                s.all_reduce(x, group="tp")
            return str(e.value).partition(": ")[2], s.all_reduce(x.contiguous(), group="tp").tolist(), x.tolist()

    told = "x of shape [3, 2] has strides (1, 3), which is not contiguous; pass x.contiguous()"
    doubled, kept = [[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]], [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert run_ranks(2, body) == [(told, doubled, kept)] * 2
