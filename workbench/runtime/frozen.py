"""FrozenWorkspace: what a workspace becomes after freeze. It never grows; a bigger call takes the fallback instead.

Captured graphs hold addresses of the workspace, so it must not be replaced (facts: SGLang's freeze of its FlashInfer
workspaces). The fallback sums over exactly the same group, then adds and normalises, under the same rounding.
"""

from __future__ import annotations

import logging

import torch

from workbench.backends.base import Workspace
from workbench.ops import FusedOutput
from workbench.trace import Lane

_log = logging.getLogger("workbench")


class FrozenWorkspace:
    """A workspace and its fallback. Members come with equal token counts, so they take the same path.

    `tells`: the first bigger call is told in a line of the log; one member's word is enough for a group.
    """

    def __init__(self, inner: Workspace, fallback: Workspace, lane: Lane, group: str, *, tells: bool) -> None:
        self.backend = inner.backend
        self.request = inner.request
        self.size_bytes = inner.size_bytes
        self._inner = inner
        self._fallback = fallback
        self._lane = lane
        self._group = group
        self._told = not tells

    @property
    def broken(self) -> str:
        """As the Workspace protocol says."""
        return self._inner.broken

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """As the Workspace protocol says, for any number of tokens."""
        return self._path(x).all_reduce(x)

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float, weight_bias: float
    ) -> FusedOutput:
        """As the Workspace protocol says, for any number of tokens."""
        return self._path(x).all_reduce_add_rms_norm(x, residual, weight, eps=eps, weight_bias=weight_bias)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the workspace, which does not grow."""
        return self._inner.empty(shape, dtype)

    def check(self) -> None:
        """What the workspace's kernels reported."""
        look = getattr(self._inner, "check", None)
        if look is not None:
            look()

    def close(self) -> None:
        """Close both."""
        self._fallback.close()
        self._inner.close()

    def _path(self, x: torch.Tensor) -> Workspace:
        if not isinstance(x, torch.Tensor) or x.dim() != 2 or x.shape[0] <= self.request.max_tokens:
            return self._inner
        note = (
            f"{self._group}: {x.shape[0]} tokens exceed the {self.request.max_tokens} of the frozen {self.backend} "
            f"workspace; {self._fallback.backend} reduces over the same group, then adds and normalises"
        )
        self._lane.instant("fallback", path=self._fallback.backend, note=note)
        if not self._told:
            self._told = True
            _log.warning("%s (told once)", note)
        return self._fallback
