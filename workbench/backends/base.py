"""What a backend is given and what it gives: a Channel and a Request in, a Workspace out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from workbench.ops import FusedOutput, Op, Rounding
from workbench.ranks import GroupKey

Json = Any  # None, bool, int, float, str, and lists and dicts of these


class Channel(Protocol):
    """The slow, safe way members of one group talk: JSON values over the group's gloo group, with a deadline.

    One per group and rank. `gather` is collective over the group: every member calls it the same number of times.
    """

    key: GroupKey
    world_rank: int
    timeout_s: float

    def gather(self, value: Json) -> list[Json]:
        """Every member's value, in group_rank order. Raises DeadlineError or PeerDeadError, naming world ranks."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a group is prepared for. Equal on every member (voted before any backend sees it)."""

    hidden: int
    dtype: torch.dtype
    max_tokens: int
    ops: frozenset[Op]
    rounding: Rounding


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether something can be used here, and why."""

    ok: bool
    reason: str


class Workspace(Protocol):
    """A backend bound to one group. Calls are collective over the group, in the same order on every member.

    Shapes: x, residual [tokens, hidden]; weight [hidden]; 0 <= tokens <= request.max_tokens, equal on every member.
    """

    backend: str
    request: Request
    size_bytes: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor: ...

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float, weight_bias: float
    ) -> FusedOutput: ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...

    def close(self) -> None: ...
