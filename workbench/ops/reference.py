"""The fused operation in plain torch: slow, and by definition right. Any device, no process group.

sum          = ((x_0 + x_1) + x_2) ...                     fp32, in group_rank order, from x_0 on (so -0.0 survives)
residual_out = T(sum + fp32(residual))                     Rounding.ONCE
             = T(fp32(T(sum)) + fp32(residual))            Rounding.TWICE, the bits of the unfused chain
norm_out     = T(fp32(residual_out) * rsqrt(mean(fp32(residual_out)^2) + eps) * (weight_bias + fp32(weight)))

T rounds to nearest even. A NaN becomes the one NaN that GPUs write (0x7fff, in fp32 0x7fffffff), because torch's own
casts give it different bits on different machines; so results compare bit for bit, NaN included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workbench.ops.fused import FusedOutput, Rounding

_NAN_BITS = {
    torch.bfloat16: (0x7FFF, torch.int16),
    torch.float16: (0x7FFF, torch.int16),
    torch.float32: (0x7FFFFFFF, torch.int32),
}


def round_to(value_fp32: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A fresh tensor of `dtype`: each element rounded to nearest even once, every NaN with the same bits."""
    bits, integer = _NAN_BITS[dtype]
    # full, not tensor: a copy from the host is not allowed while a CUDA graph is being captured
    nan = torch.full((), bits, dtype=integer, device=value_fp32.device).view(dtype)
    return torch.where(value_fp32.isnan(), nan, value_fp32.to(dtype))


def sum_fp32(contributions: Sequence[torch.Tensor]) -> torch.Tensor:
    """The fp32 sum of the contributions in the order given, which must be group_rank order. Never an input itself."""
    total = contributions[0].to(torch.float32, copy=True)
    for x in contributions[1:]:
        total += x.to(torch.float32)
    return total


def add_rms_norm(
    total_fp32: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    weight_bias: float = 0.0,
    rounding: Rounding = Rounding.ONCE,
) -> FusedOutput:
    """The local part: add the residual to a complete fp32 sum and normalise each token.

    Shapes: total_fp32 [tokens, hidden] fp32; residual [tokens, hidden] and weight [hidden] of one dtype T; returns
        fresh norm and residual of dtype T. 0 tokens is legal.
    Numerics: the formula of this file. The mean is taken in fp32 in torch's order, so the norm of another backend may
        differ in its last bit; the residual may not.
    Source: own; pinned by tests/ops/test_reference.py.
    """
    dtype = residual.dtype
    if rounding is Rounding.TWICE:
        total_fp32 = round_to(total_fp32, dtype).float()
    residual_out = round_to(total_fp32 + residual.float(), dtype)
    rows = residual_out.float()
    scale = torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + eps)
    return FusedOutput(round_to(rows * scale * (weight.float() + weight_bias), dtype), residual_out)


def reference_all_reduce(contributions: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of all members' tensors, fp32 in group_rank order, rounded once to their dtype."""
    return round_to(sum_fp32(contributions), contributions[0].dtype)


def reference_all_reduce_add_rms_norm(
    contributions: Sequence[torch.Tensor],
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    weight_bias: float = 0.0,
    rounding: Rounding = Rounding.ONCE,
) -> FusedOutput:
    """The whole fused operation on one process that holds every member's tensor.

    Shapes: contributions[group_rank] [tokens, hidden]; the rest as add_rms_norm.
    """
    return add_rms_norm(sum_fp32(contributions), residual, weight, eps=eps, weight_bias=weight_bias, rounding=rounding)
