"""vllm-project/vllm#25906.

Symptom: DP with EP hangs. Cause: each rank chose its graph by its own, unpadded number of tokens: 5 and 7 tokens are in
the buckets of 6 and 8, and the collectives of the two graphs have different sizes.
"""

from __future__ import annotations

import signal

import pytest
import torch
import torch.distributed as dist

from tests.bugs.worlds import HANG_S, HIDDEN, dies_quietly, fused, only, open_session, plain_world
from tests.forked import run_outcomes, run_ranks
from workbench.errors import MismatchError
from workbench.ranks import GroupMap

TOKENS = (5, 7)
PAIR = GroupMap.custom({"dp": [[0, 1]]})


def bucket_of(tokens: int) -> int:
    return min(b for b in (4, 6, 8) if b >= tokens)


def test_old_buckets_of_6_and_8_meet_in_one_all_reduce() -> None:
    def body(rank: int) -> None:
        dies_quietly()
        with plain_world(HANG_S):
            dist.all_reduce(torch.ones(bucket_of(TOKENS[rank]), HIDDEN))

    small, large = run_outcomes(2, body)
    assert small.signal == signal.SIGABRT  # NCCL hangs instead
    assert isinstance(large.error, RuntimeError)


def test_the_bucket_that_the_group_agrees_on_is_8_on_both() -> None:
    def body(rank: int) -> tuple[int, float]:
        with open_session(PAIR, "dp", max_tokens=8) as s:
            bucket = bucket_of(max(s.gather_object(TOKENS[rank], group="dp")))
            return bucket, only(fused(s, "dp", tokens=bucket).residual)

    assert run_ranks(2, body) == [(8, 16.0)] * 2


def test_buckets_that_differ_all_the_same_are_one_error_on_both() -> None:
    def body(rank: int) -> str:
        with open_session(PAIR, "dp", max_tokens=8) as s, pytest.raises(MismatchError) as e:
            fused(s, "dp", tokens=bucket_of(TOKENS[rank]))
        return str(e.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert "6 tokens" in first
    assert "8 tokens" in first
