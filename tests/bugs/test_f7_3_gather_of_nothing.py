"""pytorch/pytorch#85234.

Symptom: in old versions an all-gather of empty tensors on gloo ends the process with SIGFPE. Cause: a division by the
number of bytes. Kept as a probe of the installed version: this one must give empty tensors.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.bugs.worlds import HIDDEN, open_session, plain_world
from tests.forked import run_ranks
from workbench.ranks import GroupMap


def test_old_rule_divides_by_the_bytes_of_a_message() -> None:
    def chunks(num_bytes: int, chunk_bytes: int = 4096) -> int:
        return -(-num_bytes // min(chunk_bytes, num_bytes))

    assert chunks(5000) == 2
    with pytest.raises(ZeroDivisionError):
        chunks(0)


def test_the_installed_torch_gathers_nothing_without_harm() -> None:
    def body(rank: int) -> list[list[int]]:
        with plain_world():
            told = [torch.ones(0, HIDDEN) for _ in range(4)]
            dist.all_gather(told, torch.empty(0, HIDDEN))
            return [list(t.shape) for t in told]

    assert run_ranks(4, body) == [[[0, HIDDEN]] * 4] * 4


def test_the_gloo_path_does_not_even_ask_it_to() -> None:
    def body(rank: int) -> list[int]:
        whole = dist.all_gather

        def all_gather(received: list[torch.Tensor], x: torch.Tensor, **kwargs):
            assert x.numel() > 0
            return whole(received, x, **kwargs)

        with open_session(GroupMap.custom({"tp": [[0, 1, 2, 3]]})) as s:
            s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=1, backend="gloo")
            dist.all_gather = all_gather
            return list(s.all_reduce(torch.empty(0, HIDDEN), group="tp").shape)

    assert run_ranks(4, body) == [[0, HIDDEN]] * 4
