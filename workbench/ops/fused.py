"""What the fused operation means: its parts, its numerical contract, and the result it gives."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Op(Enum):
    """The collective operations a workspace can be prepared for."""

    ALL_REDUCE = "all_reduce"
    ALL_REDUCE_ADD_RMS_NORM = "all_reduce_add_rms_norm"


ALL = frozenset(Op)


class Rounding(Enum):
    """Where the sum is rounded to the tensors' dtype. Two classes give different bits and are never mixed.

    ONCE   residual_out = T(fp32 sum + fp32(residual))
    TWICE  residual_out = T(fp32(T(fp32 sum)) + fp32(residual)), the bits of the unfused chain
    """

    ONCE = "once"
    TWICE = "twice"


@dataclass(frozen=True, slots=True)
class FusedOutput:
    """norm and residual, each [tokens, hidden] in the input's dtype; quant and scale where a Quant was asked for."""

    norm: torch.Tensor
    residual: torch.Tensor
    quant: torch.Tensor | None = None
    scale: torch.Tensor | None = None
