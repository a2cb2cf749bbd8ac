"""ComposedWorkspace: a backend that only sums, then the residual and the norm in torch: the unfused chain.

The sum comes rounded from the backend, so the operation rounds twice; requests that round once never get here.
"""

from __future__ import annotations

import torch

from workbench.backends.base import Request, Workspace
from workbench.ops import FusedOutput, Limits, add_rms_norm, check_fused


class ComposedWorkspace:
    """`inner` serves all_reduce; all_reduce_add_rms_norm is its sum, an add and a norm. See base.Workspace."""

    def __init__(self, inner: Workspace, request: Request, limits: Limits) -> None:
        self.backend = inner.backend
        self.request = request
        self.size_bytes = inner.size_bytes
        self._inner = inner
        self._limits = limits

    @property
    def broken(self) -> str:
        """As the Workspace protocol says."""
        return self._inner.broken

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """As the Workspace protocol says."""
        return self._inner.all_reduce(x)

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float, weight_bias: float
    ) -> FusedOutput:
        """As the Workspace protocol says, with the bits of Rounding.TWICE."""
        check_fused(self._limits, x, residual, weight, eps, weight_bias)
        total = self._inner.all_reduce(x)
        return add_rms_norm(total.float(), residual, weight, eps=eps, weight_bias=weight_bias)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the backend."""
        return self._inner.empty(shape, dtype)

    def check(self) -> None:
        """What the backend's kernels reported."""
        look = getattr(self._inner, "check", None)
        if look is not None:
            look()

    def close(self) -> None:
        """Close the backend's workspace."""
        self._inner.close()
