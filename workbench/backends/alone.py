"""Backend for a group of one rank: nothing to reduce and nobody to wait for, so it allocates nothing."""

from __future__ import annotations

from typing import Protocol

import torch

from workbench.backends.base import Channel, Request, Verdict, limits_of
from workbench.errors import ClosedError
from workbench.ops import (
    FusedOutput,
    add_rms_norm,
    check_all_reduce,
    check_empty,
    check_fused,
    round_to,
    sum_fp32,
)
from workbench.ranks import GroupKey

NAME = "alone"


class _DeviceChannel(Channel, Protocol):
    device: str


def probe(request: Request, key: GroupKey) -> Verdict:  # noqa: ARG001 - the signature every backend has
    """Fine for a group of one rank. Local."""
    return Verdict(key.size == 1, "the group has one rank" if key.size == 1 else f"{key} has {key.size} ranks")


def bind(channel: _DeviceChannel, request: Request) -> AloneWorkspace:
    """The workspace. Local."""
    return AloneWorkspace(channel, request)


class AloneWorkspace:
    """The fused operation of a group of one: add the residual and normalise."""

    backend = NAME
    size_bytes = 0

    def __init__(self, channel: _DeviceChannel, request: Request) -> None:
        self.request = request
        self._story = ""
        self._limits = limits_of(channel, request, channel.device)

    @property
    def broken(self) -> str:
        """As the Workspace protocol says."""
        return self._story

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """x itself, in a fresh tensor."""
        self._require_open()
        check_all_reduce(self._limits, x)
        return round_to(sum_fp32([x]), x.dtype)

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float, weight_bias: float
    ) -> FusedOutput:
        """As the Workspace protocol says."""
        self._require_open()
        check_fused(self._limits, x, residual, weight, eps, weight_bias)
        return add_rms_norm(
            sum_fp32([x]), residual, weight, eps=eps, weight_bias=weight_bias, rounding=self.request.rounding
        )

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Ordinary memory: nobody else reads it."""
        check_empty(self._limits, shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self._limits.device)

    def close(self) -> None:
        """Nothing to give back."""
        self._story = f"{self._limits.group}: this workspace is closed; prepare a new one"

    def _require_open(self) -> None:
        if self._story:
            raise ClosedError(self._story)
