"""flashinfer-ai/flashinfer#3186 (PR 3187), sgl-project/sglang#23317.

Symptom: one rank straggles, or all hang in the allocation of symmetric memory. Cause: each rank's autotuner takes the
minimum of its own timings, and the choices want scratch of different sizes for one collective allocation.
"""

from __future__ import annotations

import pytest
import torch

from tests.bugs.worlds import HIDDEN, fused, only, open_session
from tests.forked import run_ranks
from workbench.errors import PlanMismatchError
from workbench.ranks import GroupMap

TIMINGS_US = ((1.00, 1.01), (1.03, 1.00))  # of two tactics, on world ranks 0 and 1
SCRATCH_TOKENS = (4, 64)
PAIR = GroupMap.custom({"tp": [[0, 1]]})


def test_old_each_ranks_own_minimum_is_another_tactic() -> None:
    choices = [timings.index(min(timings)) for timings in TIMINGS_US]
    assert choices == [0, 1]
    assert [SCRATCH_TOKENS[c] for c in choices] == [4, 64]


def test_different_scratch_sizes_are_refused_before_anything_is_allocated() -> None:
    def body(rank: int) -> str:
        choice = TIMINGS_US[rank].index(min(TIMINGS_US[rank]))
        with open_session(PAIR) as s, pytest.raises(PlanMismatchError) as e:
            s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=SCRATCH_TOKENS[choice])
        return str(e.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert "world rank 0: hidden=8 dtype=torch.float32 max_tokens=4" in first
    assert "world rank 1: hidden=8 dtype=torch.float32 max_tokens=64" in first


def test_the_slowest_members_timings_choose_one_tactic_for_all() -> None:
    def body(rank: int) -> tuple[int, int, float]:
        with open_session(PAIR) as s:
            told = s.gather_object(TIMINGS_US[rank], group="tp")
            slowest = [max(of_all) for of_all in zip(*told, strict=True)]
            choice = slowest.index(min(slowest))
            plan = s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=SCRATCH_TOKENS[choice])
            return choice, plan.capacity_tokens, only(fused(s, "tp").residual)

    assert run_ranks(2, body) == [(1, 64, 16.0)] * 2
