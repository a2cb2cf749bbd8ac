"""ROCm/rccl#429.

Symptom: a hang. Cause: one rank issued an all-gather where the others all-reduced, on another stream; nothing says
which rank came with which operation, or from where.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.bugs.worlds import HANG_S, HIDDEN, error_name, fused, open_session, part, plain_world
from tests.forked import run_ranks
from workbench.errors import MismatchError
from workbench.ranks import GroupMap
from workbench.runtime import Session
from workbench.trace import read_directory, rendezvous_lanes

PAIR = GroupMap.custom({"tp": [[0, 1]]})


def test_old_both_ranks_time_out_and_neither_says_why() -> None:
    def body(rank: int) -> object:
        with plain_world(HANG_S):
            x = torch.ones(HIDDEN)
            if rank == 0:
                return error_name(lambda: dist.all_reduce(x))
            return error_name(lambda: dist.all_gather([torch.empty(HIDDEN) for _ in range(2)], x))

    assert run_ranks(2, body) == ["RuntimeError"] * 2


def attention(s: Session) -> None:
    s.all_reduce(part(s.world_rank), group="tp")


def mlp(s: Session) -> None:
    fused(s, "tp")


def test_check_mode_names_both_operations_on_both_ranks_and_the_trace_both_places(tmp_path) -> None:
    def body(rank: int) -> str:
        with open_session(PAIR, "tp", check=True, trace_dir=tmp_path) as s, pytest.raises(MismatchError) as e:
            (attention if rank == 0 else mlp)(s)
        return str(e.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert "world rank 0: all_reduce (sum)" in first
    assert "world rank 1: all_reduce_add_rms_norm (sum)" in first
    (call,) = (
        c for c in rendezvous_lanes(read_directory(tmp_path)).calls if any(v.op.startswith("all_r") for v in c.visits)
    )
    assert [(v.world_rank, v.op, v.site.function) for v in call.visits] == [
        (0, "all_reduce", "attention"),
        (1, "all_reduce_add_rms_norm", "fused"),
    ]


def test_without_check_mode_it_is_an_error_on_both_ranks_all_the_same() -> None:
    def body(rank: int) -> object:
        with open_session(PAIR, "tp") as s:
            return error_name(lambda: (attention if rank == 0 else mlp)(s))

    assert run_ranks(2, body) == ["MismatchError"] * 2
