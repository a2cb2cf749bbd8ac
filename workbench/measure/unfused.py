"""What fusion is compared with: an all-reduce, a residual add, torch's RMSNorm; by the library, or on our own path."""

from __future__ import annotations

import torch
import torch.distributed as dist

from workbench.runtime import Session


class Unfused:
    """all_reduce (gloo on CPU, NCCL on CUDA) + add + rms_norm on one group, in place on a scratch copy of x.

    Sums grow from call to call, since the scratch is reduced again; `reset` fills it anew. Call it often enough that
    N^calls stays finite.
    """

    def __init__(
        self, session: Session, kind: str, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
    ) -> None:
        self._group = session.torch_group(kind)
        self._x, self._residual, self._weight, self._eps = x, residual, weight, eps
        self._scratch = x.clone()

    def reset(self) -> None:
        """Start again from x."""
        self._scratch.copy_(self._x)

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """norm and residual, as fresh tensors. Collective over the group."""
        dist.all_reduce(self._scratch, group=self._group)
        residual = self._scratch + self._residual
        return torch.nn.functional.rms_norm(residual, self._weight.shape, self._weight, self._eps), residual


class Steps:
    """The session's own all-reduce of x, then an add, then torch's rms_norm: the fused path's transport, unfused.

    So fused beside this is what fusing alone buys, and this beside Unfused what the transport does.
    """

    def __init__(
        self, session: Session, kind: str, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
    ) -> None:
        self._session, self._kind = session, kind
        self._x, self._residual, self._weight, self._eps = x, residual, weight, eps

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """norm and residual, as fresh tensors. Collective over the group."""
        residual = self._session.all_reduce(self._x, group=self._kind) + self._residual
        return torch.nn.functional.rms_norm(residual, self._weight.shape, self._weight, self._eps), residual
