"""Pins that the first calls of a library's path tell a wrong sum and another rounding from the contract's.

On CPU ranks: our gloo path passes, torch's own all-reduce of bf16 does not, since it rounds after each addition.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.backends.ranks import GlooChannel, channels, request, run_ranks
from workbench.backends import gloo
from workbench.backends.first_calls import EPS, prove_calls
from workbench.errors import ResourceError
from workbench.ops import ALL, FusedOutput, Op, Rounding


@pytest.mark.parametrize("rounding", [Rounding.ONCE, Rounding.TWICE])
def test_a_path_that_keeps_the_contract_passes_on_interleaved_groups(rounding: Rounding) -> None:
    def body(rank: int) -> bool:
        with channels((0, 2), (1, 3)) as (channel,):
            asked = request(64, rounding=rounding)
            workspace = gloo.bind(channel, asked)
            prove_calls(
                channel,
                asked,
                tokens=3,
                reduce=workspace.all_reduce,
                fuse=lambda x, r, w: workspace.all_reduce_add_rms_norm(x, r, w, eps=EPS, weight_bias=0.0),
                device="cpu",
            )
            return True

    assert run_ranks(4, body) == [True] * 4


def test_rounding_after_each_addition_is_found_with_three_members() -> None:
    def body(rank: int) -> str:
        with channels((0, 1, 2)) as (channel,):
            return refusal(channel, frozenset({Op.ALL_REDUCE}), reduce=lambda x: library_sum(channel, x))

    for told in run_ranks(3, body):
        assert told.startswith("a first sum of normal numbers: ")
        assert "elements differ from rounding=once" in told


def test_the_other_rounding_class_is_found() -> None:
    """A path that rounds the sum before it adds, offered for rounding="once"."""

    def body(rank: int) -> str:
        with channels((0, 1)) as (channel,):
            twice = gloo.bind(channel, request(64, rounding=Rounding.TWICE))
            return refusal(
                channel,
                ALL,
                reduce=twice.all_reduce,
                fuse=lambda x, r, w: twice.all_reduce_add_rms_norm(x, r, w, eps=EPS, weight_bias=0.0),
            )

    assert all(t.startswith("a first residual of normal numbers: ") for t in run_ranks(2, body))


def test_a_sum_over_too_many_members_is_found_by_whole_numbers() -> None:
    """All four ranks where two were meant: 1 + 2 + 1 + 2 is 6 and not 3."""

    def body(rank: int) -> str:
        with channels((0, 2), (1, 3)) as (channel,):
            return refusal(channel, ALL, reduce=lambda x: library_sum(None, x))

    assert (
        run_ranks(4, body)
        == ["a first sum of whole numbers: 128 of 128 elements differ from rounding=once; element 0 is 6.0 and not 3.0"]
        * 4
    )


def test_a_norm_that_is_off_is_found() -> None:
    def body(rank: int) -> str:
        with channels((0, 1)) as (channel,):
            right = gloo.bind(channel, request(64))

            def fuse(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> FusedOutput:
                out = right.all_reduce_add_rms_norm(x, r, w, eps=EPS, weight_bias=0.0)
                return FusedOutput(out.norm * 1.125, out.residual)

            return refusal(channel, ALL, reduce=right.all_reduce, fuse=fuse)

    assert all(t.startswith("a first norm of whole numbers is off by up to 0.125") for t in run_ranks(2, body))


def library_sum(channel: GlooChannel | None, x: torch.Tensor) -> torch.Tensor:
    total = x.clone()
    dist.all_reduce(total, group=None if channel is None else channel.torch_group)
    return total


def refusal(channel: GlooChannel, ops: frozenset[Op], **calls: object) -> str:
    asked = request(64)
    asked = type(asked)(
        hidden=asked.hidden, dtype=asked.dtype, max_tokens=asked.max_tokens, ops=ops, rounding=asked.rounding
    )
    with pytest.raises(ResourceError) as told:
        prove_calls(channel, asked, tokens=2, device="cpu", **{"fuse": None, **calls})
    return str(told.value)
