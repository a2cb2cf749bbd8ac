"""Backend `reference`: the definition itself, for tests. Gathers every contribution and runs ops.reference on them."""

from __future__ import annotations

import torch

from workbench.backends.base import Channel, Request, Verdict
from workbench.backends.gathered import Arithmetic, GatheredWorkspace
from workbench.ops import (
    DTYPES,
    FusedOutput,
    Rounding,
    reference_all_reduce,
    reference_all_reduce_add_rms_norm,
)
from workbench.ranks import GroupKey

NAME = "reference"


def probe(request: Request, key: GroupKey) -> Verdict:
    """Everywhere, for the three dtypes. Local."""
    if request.dtype not in DTYPES:
        return Verdict(False, f"{request.dtype}; the reference serves bfloat16, float16 and float32")
    return Verdict(True, f"torch on every member's tensor, {key.size} ranks; for tests")


def bind(channel: Channel, request: Request) -> GatheredWorkspace:
    """A workspace over the channel's gloo group. Collective: every member of the group."""
    return GatheredWorkspace(NAME, channel, request, Arithmetic(reference_all_reduce, _fused))


def _fused(
    contributions: list[torch.Tensor],
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_bias: float,
    rounding: Rounding,
) -> FusedOutput:
    return reference_all_reduce_add_rms_norm(
        contributions, residual, weight, eps=eps, weight_bias=weight_bias, rounding=rounding
    )
