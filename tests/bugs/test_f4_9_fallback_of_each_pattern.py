"""NVIDIA/TensorRT-LLM#4009.

Symptom: the fused op fails, or gives wrong results, for messages beyond its workspace. Cause: patterns without a
fallback of their own: too large a message reached the kernel all the same.
"""

from __future__ import annotations

import pytest
import torch

from tests.bugs.worlds import EPS, HIDDEN, open_session
from tests.forked import run_ranks
from workbench.errors import CapacityError
from workbench.ops import FusedOutput, Rounding, reference_all_reduce, reference_all_reduce_add_rms_norm
from workbench.ranks import GroupMap
from workbench.runtime import Session

PAIR = GroupMap.custom({"tp": [[0, 1]]})
CAPACITY = 4
PATTERNS = ("sum", "fused", "fused, weight bias 1")


def _inputs(rank: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x of one rank, and residual and weight alike on all; bf16, so that every rounding shows."""

    def normal(seed: int, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()

    return normal(rank, tokens, HIDDEN), normal(90, tokens, HIDDEN), normal(91, HIDDEN)


def _run(s: Session, pattern: str, tokens: int) -> FusedOutput | torch.Tensor:
    x, residual, weight = _inputs(s.world_rank, tokens)
    if pattern == "sum":
        return s.all_reduce(x, group="tp")
    bias = float(pattern.endswith("1"))
    return s.all_reduce_add_rms_norm(x, residual, weight, eps=EPS, group="tp", weight_bias=bias)


def _wanted(pattern: str, tokens: int, rounding: str) -> FusedOutput | torch.Tensor:
    xs = [_inputs(r, tokens)[0] for r in range(2)]
    if pattern == "sum":
        return reference_all_reduce(xs)
    _, residual, weight = _inputs(0, tokens)
    bias = float(pattern.endswith("1"))
    return reference_all_reduce_add_rms_norm(
        xs, residual, weight, eps=EPS, weight_bias=bias, rounding=Rounding(rounding)
    )


def test_old_one_token_beyond_the_buffer_is_written_into_what_lies_behind_it() -> None:
    memory = torch.zeros(CAPACITY + 1, HIDDEN)
    workspace, neighbour = memory[:CAPACITY], memory[CAPACITY:]
    message = torch.ones(CAPACITY + 1, HIDDEN)
    memory.view(-1)[: message.numel()].copy_(message.view(-1))  # the kernel knows where the workspace begins, no more
    assert workspace.unique().tolist() == [1.0]
    assert neighbour.unique().tolist() == [1.0]  # right: 0


@pytest.mark.parametrize("rounding", ["once", "twice"])
def test_beyond_the_workspace_every_pattern_gives_what_the_definition_gives(rounding: str) -> None:
    def body(rank: int) -> list[tuple[str, int, bool, bool]]:
        found = []
        with Session(PAIR, device="cpu", timeout_s=20) as s:
            s.prepare("tp", hidden=HIDDEN, dtype=torch.bfloat16, max_tokens=CAPACITY, rounding=rounding)
            s.freeze()
            for pattern in PATTERNS:
                for tokens in (CAPACITY, CAPACITY + 1):
                    out, wanted = _run(s, pattern, tokens), _wanted(pattern, tokens, rounding)
                    if isinstance(out, FusedOutput):
                        same = torch.equal(out.residual, wanted.residual)
                        close = torch.allclose(out.norm.float(), wanted.norm.float(), rtol=2**-7)  # one bit of bf16
                    else:
                        same = close = torch.equal(out, wanted)
                    found.append((pattern, tokens, same, close))
        return found

    expected = [(pattern, tokens, True, True) for pattern in PATTERNS for tokens in (4, 5)]
    assert run_ranks(2, body) == [expected] * 2


def test_a_session_that_is_not_frozen_refuses_and_says_what_to_do() -> None:
    def body(rank: int) -> str:
        with open_session(PAIR, "tp") as s, pytest.raises(CapacityError) as e:
            s.all_reduce(torch.ones(CAPACITY + 1, HIDDEN), group="tp")
        return str(e.value)

    text = "5 tokens asked, prepared for at most 4; prepare with max_tokens=5 or split the batch"
    assert run_ranks(2, body) == [f"tp[0,1] on world rank {r}: {text}" for r in range(2)]
