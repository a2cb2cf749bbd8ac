"""NVIDIA/nccl#1394 and #1417.

Symptom: an all-reduce over different shapes hangs at times, and at times returns wrong tails. Cause: no layer compares
what the ranks bring. On gloo: unequal sizes abort one process; equal sizes of another shape or dtype are summed as they
lie in memory, without a word.
"""

from __future__ import annotations

import signal

import pytest
import torch
import torch.distributed as dist

from tests.bugs.worlds import HANG_S, dies_quietly, plain_world
from tests.forked import run_outcomes, run_ranks
from workbench.errors import MismatchError
from workbench.ranks import GroupMap
from workbench.runtime import Session

PAIR = GroupMap.custom({"tp": [[0, 1]]})


@pytest.mark.parametrize("shapes", [((4,), (6,)), ((100, 256), (200, 256))])
def test_old_of_unequal_sizes_the_smaller_process_aborts(shapes) -> None:
    def body(rank: int) -> None:
        dies_quietly()
        with plain_world(HANG_S):
            dist.all_reduce(torch.ones(shapes[rank]))

    small, large = run_outcomes(2, body)
    assert small.signal == signal.SIGABRT
    assert isinstance(large.error, RuntimeError)


def test_old_another_shape_of_equal_size_is_summed_in_memory_order() -> None:
    def body(rank: int) -> list[float]:
        with plain_world():
            x = torch.arange(24.0).view((4, 6) if rank == 0 else (6, 4))
            dist.all_reduce(x)
            return x[1].tolist()

    assert run_ranks(2, body) == [[12.0, 14.0, 16.0, 18.0, 20.0, 22.0], [8.0, 10.0, 12.0, 14.0]]


def test_old_other_dtypes_of_equal_size_are_summed_as_bits() -> None:
    def body(rank: int) -> tuple[float, bool]:
        with plain_world():
            x = torch.ones(4, dtype=torch.float32 if rank == 0 else torch.int32)
            dist.all_reduce(x)
            y = torch.ones(4, dtype=torch.bfloat16 if rank == 0 else torch.float16)
            dist.all_reduce(y)
            return x[0].item(), bool((y == 2).any())

    assert run_ranks(2, body) == [(1.0, False), (1065353216.0, False)]


def _x(how: str, rank: int) -> torch.Tensor:
    odd = rank == 1
    return {
        "more tokens": torch.ones(6 if odd else 4, 6),
        "another shape": torch.ones((6, 4) if odd else (4, 6)),
        "no tokens": torch.ones(2 if odd else 0, 6),
        "another dtype": torch.ones(4, 6, dtype=torch.bfloat16 if odd else torch.float16),
        "other strides": torch.ones(6, 4).t() if odd else torch.ones(4, 6),
    }[how]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("more tokens", ("float32 [4, 6] strides [6, 1]", "float32 [6, 6] strides [6, 1]")),
        ("another shape", ("float32 [4, 6] strides [6, 1]", "float32 [6, 4] strides [4, 1]")),
        ("no tokens", ("float32 [0, 6] strides [6, 1]", "float32 [2, 6] strides [6, 1]")),
        ("another dtype", ("float16 [4, 6] strides [6, 1]", "bfloat16 [4, 6] strides [6, 1]")),
        ("other strides", ("float32 [4, 6] strides [6, 1]", "float32 [4, 6] strides [1, 4]")),
    ],
)
def test_check_mode_tells_both_ranks_what_each_brought_before_any_data_moves(how: str, told: tuple[str, str]) -> None:
    def body(rank: int) -> tuple[str, float]:
        with Session(PAIR, device="cpu", timeout_s=20, check=True) as s:
            for hidden, dtype in (
                (6, torch.float32),
                (4, torch.float32),
                (6, torch.bfloat16),
                (6, torch.float16),
            ):
                s.prepare("tp", hidden=hidden, dtype=dtype, max_tokens=6)
            with pytest.raises(MismatchError) as e:
                s.all_reduce(_x(how, rank), group="tp")
            right = s.all_reduce(torch.full((4, 6), 10.0**rank), group="tp")
            return str(e.value), right.unique().item()

    (text0, value0), (text1, value1) = run_ranks(2, body)
    assert text0 == text1
    assert all(f"world rank {r}: all_reduce (sum), x {told[r]}, on shm" in text0 for r in range(2))
    assert (value0, value1) == (11.0, 11.0)
