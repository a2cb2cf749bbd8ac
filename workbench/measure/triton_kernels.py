"""Two small Triton kernels of the comparison: residual-add + RMSNorm as engines have it, and a plain copy.

Loaded on GPUs only. No postponed annotations here: Triton reads them as objects.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator, unused-ignore] # Triton is not typed
def _add_rms_norm(x, r, w, norm, total, hidden, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # Triton's language, not Python's
    row = tl.program_id(0).to(tl.int64) * hidden
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    a = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    a += tl.load(r + row + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + row + at, a, mask=inside)
    scale = tl.rsqrt(tl.sum(a * a) / hidden + eps)
    tl.store(norm + row + at, a * scale * tl.load(w + at, mask=inside, other=0.0).to(tl.float32), mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore] # as above
def _copy(source, target, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # as above
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)


def add_rms_norm_into(
    norm: torch.Tensor, total: torch.Tensor, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    """norm and total [tokens, hidden], which may be residual: total = x + residual, norm from it before rounding."""
    block = triton.next_power_of_2(x.shape[1])
    _add_rms_norm[(x.shape[0],)](x, residual, weight, norm, total, x.shape[1], eps, BLOCK=block, num_warps=8)


def copy_by_threads(source: torch.Tensor, target: torch.Tensor) -> None:
    """target = source by loads and stores of the multiprocessors, never by a copy engine."""
    _copy[(triton.cdiv(source.numel(), 4096),)](source, target, source.numel(), BLOCK=4096, num_warps=8)


AddNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], None]
