"""Backend `gloo`: serves without a compiler and on any hosts. Gather, fp32 sum in group_rank order, add, norm.

dist.all_reduce is not used: its order of summation depends on the size and the ranks, and it rounds at every step.
"""

from __future__ import annotations

import torch

from workbench.backends.base import Channel, Request, Verdict
from workbench.backends.gathered import Arithmetic, GatheredWorkspace
from workbench.ops import DTYPES, FusedOutput, Rounding, add_rms_norm, round_to, sum_fp32
from workbench.ranks import GroupKey

NAME = "gloo"


def probe(request: Request, key: GroupKey) -> Verdict:
    """Everywhere, for the three dtypes. Local."""
    if request.dtype not in DTYPES:
        return Verdict(False, f"{request.dtype}; the gloo path serves bfloat16, float16 and float32")
    return Verdict(True, f"gloo all-gather and torch, {key.size} ranks")


def bind(channel: Channel, request: Request) -> GatheredWorkspace:
    """A workspace over the channel's gloo group. Collective: every member of the group."""
    return GatheredWorkspace(NAME, channel, request, Arithmetic(_sum, _fused))


def _sum(contributions: list[torch.Tensor]) -> torch.Tensor:
    return round_to(sum_fp32(contributions), contributions[0].dtype)


def _fused(
    contributions: list[torch.Tensor],
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_bias: float,
    rounding: Rounding,
) -> FusedOutput:
    total = sum_fp32(contributions)
    return add_rms_norm(total, residual, weight, eps=eps, weight_bias=weight_bias, rounding=rounding)
