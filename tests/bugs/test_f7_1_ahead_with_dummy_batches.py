"""vllm-project/vllm#28224.

Symptom: a DP run hangs near its end. Cause: a rank that has no requests left runs dummy batches, which make one call
more than real ones, and so gets ahead of its peers.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.bugs.worlds import HANG_S, HIDDEN, fused, only, open_session, part, plain_world
from tests.forked import run_ranks
from workbench.errors import MismatchError
from workbench.ranks import GroupMap

STEPS = (10, 7)  # real steps of world ranks 0 and 1
PAIR = GroupMap.custom({"dp": [[0, 1]]})


def test_old_the_rank_that_is_done_first_waits_for_a_call_that_nobody_makes() -> None:
    def body(rank: int) -> list[object]:
        sums: list[object] = []
        with plain_world(HANG_S):
            try:
                for step in range(STEPS[0]):
                    x = part(rank)
                    if step >= STEPS[rank]:
                        dist.all_reduce(torch.zeros(1, HIDDEN))  # "is anybody still busy?"
                        x.zero_()
                    dist.all_reduce(x)
                    sums.append(only(x))
            except RuntimeError:
                sums.append("waits for ever")
        return sums

    # Steps 8 to 10 of rank 0 meet the syncs of rank 1 as well as its steps, and nothing shows it.
    assert run_ranks(2, body) == [[11.0] * 7 + [1.0] * 3, [11.0] * 7 + [1.0, "waits for ever"]]


def test_an_idle_rank_makes_the_same_calls_with_nothing_to_add() -> None:
    def body(rank: int) -> list[float]:
        with open_session(PAIR, "dp", check=True) as s:
            return [
                only(s.all_reduce(part(rank) if step < STEPS[rank] else torch.zeros(1, HIDDEN), group="dp"))
                for step in range(STEPS[0])
            ]

    assert run_ranks(2, body) == [[11.0] * 7 + [1.0] * 3] * 2


def test_a_step_that_meets_the_extra_sync_is_an_error_on_both_ranks() -> None:
    def body(rank: int) -> str:
        with open_session(PAIR, "dp") as s, pytest.raises(MismatchError) as e:
            for step in range(STEPS[0]):
                if step >= STEPS[rank]:
                    s.all_reduce(torch.zeros(1, HIDDEN), group="dp")
                fused(s, "dp")
        return str(e.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert first.startswith("dp[0,1]: call 8: world rank 0 came with all_reduce_add_rms_norm")
    assert "world rank 1 came with all_reduce, 1 tokens" in first
