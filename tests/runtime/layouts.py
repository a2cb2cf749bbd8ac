"""The layouts the runtime's tests run on, and the inputs that tell ranks apart."""

from __future__ import annotations

import torch

from workbench.ops import FusedOutput
from workbench.ranks import GroupMap
from workbench.runtime import Session

HIDDEN = 64
FOUR = GroupMap.build("sglang", tp=4, attn_cp=2, moe_ep=2)
SIX = GroupMap.build("sglang", tp=6, attn_cp=2, moe_ep=3)
SIXTEEN = GroupMap.build("sglang", tp=16, attn_cp=2, attn_dp=2, moe_ep=4)
KINDS = ("tp", "attention_tp", "attn_cp", "moe_ep", "moe_tp")
EPS = 1e-6


def fused_powers(session: Session, kind: str, tokens: int, dtype: torch.dtype = torch.float32) -> FusedOutput:
    """World rank r contributes 2^r, the residual is 5. fp32 keeps every such sum of 16 ranks exact."""
    x = torch.full((tokens, HIDDEN), 2.0**session.world_rank, dtype=dtype)
    return session.all_reduce_add_rms_norm(
        x, torch.full_like(x, 5), torch.ones(HIDDEN, dtype=dtype), eps=EPS, group=kind
    )
