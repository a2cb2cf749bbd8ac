"""flashinfer-ai/flashinfer#3247 (after #2955).

Symptom: with four devices and TP 2, warm-up waits for four ranks, or a group works with another group's handles. Cause:
between two releases the default of the group argument changed its meaning to WORLD.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.bugs.worlds import HANG_S, HIDDEN, error_name, open_session, part, plain_world
from tests.forked import run_ranks
from workbench.ranks import GroupMap


def _share_handle(rank: int, group: dist.ProcessGroup | None = None) -> str:
    box = [f"handle of {rank}"]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def test_old_without_a_group_every_group_gets_the_first_groups_handle() -> None:
    def body(rank: int) -> str:
        with plain_world():
            return _share_handle(rank)

    assert run_ranks(4, body) == ["handle of 0"] * 4  # right: 0, 0, 2, 2


def test_old_without_a_group_two_ranks_wait_for_four() -> None:
    def body(rank: int) -> object:
        with plain_world(HANG_S):
            if rank >= 2:
                return "has no workspace to make"
            told = [None] * dist.get_world_size()
            return error_name(lambda: dist.all_gather_object(told, rank))

    assert run_ranks(4, body) == ["RuntimeError"] * 2 + ["has no workspace to make"] * 2


def test_every_call_wants_a_kind_and_none_has_a_default() -> None:
    def body(rank: int) -> list[object]:
        with open_session(GroupMap.custom({"tp": [[0, 1], [2, 3]]}), "tp") as s:
            x, weight = part(rank), torch.ones(HIDDEN)
            calls = [
                lambda: s.prepare(hidden=HIDDEN, dtype=torch.float32, max_tokens=4),
                lambda: s.broadcast_object(1),
                lambda: s.gather_object(1),
                lambda: s.barrier(),
                lambda: s.empty((1, HIDDEN), torch.float32),
                lambda: s.all_reduce(x),
                lambda: s.all_reduce_add_rms_norm(x, x, weight, eps=1e-6),
            ]
            refusals = [error_name(call) for call in calls]
            return [*refusals, s.broadcast_object(f"handle of {rank}", group="tp")]

    refused = ["TypeError"] * 5 + ["ArgumentError"] * 2
    assert run_ranks(4, body) == [[*refused, f"handle of {leader}"] for leader in (0, 0, 2, 2)]
