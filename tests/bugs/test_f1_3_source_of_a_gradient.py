"""pytorch/pytorch#130515 (repair proposed in PR 190583).

Symptom: gradients through a broadcast in a subgroup are all zero. Cause: the backward pass asks "am I the source?" by
comparing this process's rank in the group with the source's rank in the world.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable

from tests.bugs.worlds import new_groups, open_session, plain_world
from tests.forked import run_ranks
from workbench.ranks import GroupKey, GroupMap


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional")
def test_old_the_source_gets_no_gradient() -> None:
    def body(rank: int) -> list[float] | None:
        with plain_world():
            (group,) = new_groups([1])
            if rank == 0:
                return None
            x = torch.ones(3, requires_grad=True)
            differentiable.broadcast(x, 1, group=group).sum().backward()
            return x.grad.tolist()

    assert run_ranks(2, body) == [None, [0.0, 0.0, 0.0]]


class _Broadcast(torch.autograd.Function):
    """The same operation with one numbering: a GroupKey says whether this world rank is the root."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, key: GroupKey, group_root: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.is_root, ctx.root, ctx.group = (
            key.group_rank(dist.get_rank()) == group_root,
            key.world_rank(group_root),
            group,
        )
        y = x.clone()
        dist.broadcast(y, src=ctx.root, group=group)
        return y

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        total = grad.clone()
        dist.reduce(total, dst=ctx.root, group=ctx.group)
        return total if ctx.is_root else torch.zeros_like(total), None, None, None


@pytest.mark.parametrize(
    ("ranks", "wanted"), [([1], [None, 1.0, None]), ([1, 2], [None, 2.0, 0.0])], ids=["alone", "pair"]
)
def test_asked_in_the_keys_numbering_the_source_gets_every_members_gradient(ranks: list[int], wanted: list) -> None:
    key = GroupKey("tp", tuple(ranks))

    def body(rank: int) -> float | None:
        with plain_world():
            (group,) = new_groups(ranks)
            if rank not in key:
                return None
            x = torch.ones(3, requires_grad=True)
            _Broadcast.apply(x, key, 0, group).sum().backward()
            return x.grad.unique().item()

    assert run_ranks(3, body) == wanted


def test_a_session_broadcasts_from_the_one_member_of_a_group_that_is_not_world_rank_0() -> None:
    def body(rank: int) -> object:
        with open_session(GroupMap.custom({"tp": [[0], [1]]})) as s:
            return s.broadcast_object(rank, group="tp", group_root=0)

    assert run_ranks(2, body) == [0, 1]
