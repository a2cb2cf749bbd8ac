"""pytorch/pytorch#174844.

Symptom: a gather of different shapes "succeeds", and the next barrier hangs. Cause: the mismatch leaves the channel out
of step, and nothing marks it as such. On gloo, of a gather of 3x4 and a scalar: one process aborts, and the other gets
an error, or numbers that nobody sent.
"""

from __future__ import annotations

import signal

import pytest
import torch
import torch.distributed as dist

from tests.bugs.worlds import HANG_S, HIDDEN, dies_quietly, fused, only, open_session, plain_world
from tests.forked import run_outcomes, run_ranks
from workbench.errors import ClosedError, MismatchError
from workbench.ranks import GroupMap


def test_old_the_gather_returns_what_nobody_sent_or_breaks_and_the_peer_is_gone() -> None:
    def body(rank: int) -> list[float]:
        dies_quietly()
        with plain_world(HANG_S):
            x = torch.arange(12.0).view(3, 4) if rank == 0 else torch.tensor(100.0)
            told = [torch.full_like(x, -1) for _ in range(2)]
            dist.all_gather(told, x)
            return told[1].flatten().tolist()

    first, second = run_outcomes(2, body)
    assert second.signal == signal.SIGABRT
    assert isinstance(first.error, RuntimeError) or 100.0 not in first.value


def test_the_first_call_fails_on_both_the_next_says_so_and_a_rebuild_is_right() -> None:
    def body(rank: int) -> tuple[str, str, float]:
        with open_session(GroupMap.custom({"tp": [[0, 1]]}), "tp") as s:
            x = torch.ones(3 if rank == 0 else 1, HIDDEN)
            with pytest.raises(MismatchError) as first:
                s.all_reduce(x, group="tp")
            with pytest.raises(ClosedError) as second:
                s.all_reduce(torch.ones(1, HIDDEN), group="tp")
            s.barrier(group="tp")
            s.rebuild()
            return str(first.value), str(second.value), only(fused(s, "tp").residual)

    for rank, (first, second, value) in enumerate(run_ranks(2, body)):
        assert first == (
            "tp[0,1]: call 1: world rank 0 came with all_reduce, 3 tokens of hidden 8, float32 but world rank 1 came "
            "with all_reduce, 1 tokens of hidden 8, float32; every member must make the same call"
        )
        assert second == (
            f"tp[0,1] on world rank {rank}: the workspace is broken by an earlier failure: {first}; rebuild it"
        )
        assert value == 16.0
