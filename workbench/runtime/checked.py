"""CheckedWorkspace: every call's arguments are compared across the group before it runs. Slow; for finding mistakes."""

from __future__ import annotations

import torch

from workbench.backends.base import Workspace
from workbench.errors import MismatchError
from workbench.ops import FusedOutput
from workbench.runtime.channel import AloneChannel, GlooChannel


def compare_calls(channel: GlooChannel | AloneChannel, mine: str) -> None:
    """Raise MismatchError on every member unless all came with the text `mine`. Collective over the group."""
    told = channel.gather(mine, what="check")
    if any(text != told[0] for text in told):
        story = "; ".join(f"world rank {r}: {text}" for r, text in zip(channel.key.world_ranks, told, strict=True))
        raise MismatchError(f"{channel.key}: members came with different calls: {story}")


class CheckedWorkspace:
    """A workspace behind the comparison. What differs in shape, dtype, strides, op or path is every member's error."""

    def __init__(self, inner: Workspace, channel: GlooChannel | AloneChannel) -> None:
        self.backend = inner.backend
        self.request = inner.request
        self.size_bytes = inner.size_bytes
        self._inner = inner
        self._channel = channel

    @property
    def broken(self) -> str:
        """As the Workspace protocol says."""
        return self._inner.broken

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """As the Workspace protocol says; MismatchError before any data moves."""
        compare_calls(self._channel, f"all_reduce (sum), x {_text(x)}, on {self.backend}")
        return self._inner.all_reduce(x)

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float, weight_bias: float
    ) -> FusedOutput:
        """As the Workspace protocol says; MismatchError before any data moves."""
        compare_calls(
            self._channel,
            f"all_reduce_add_rms_norm (sum), x {_text(x)}, residual {_text(residual)}, weight {_text(weight)}, "
            f"eps {eps!r}, weight_bias {weight_bias!r}, on {self.backend}",
        )
        return self._inner.all_reduce_add_rms_norm(x, residual, weight, eps=eps, weight_bias=weight_bias)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As the Workspace protocol says."""
        return self._inner.empty(shape, dtype)

    def close(self) -> None:
        """The workspace belongs to the session."""


def _text(x: object) -> str:
    if not isinstance(x, torch.Tensor):
        return f"a {type(x).__name__}"
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} strides {list(x.stride())}"
