"""What a backend is given and what it gives: a Channel and a Request in, a Workspace out.

A backend is a module of this package with three names, and a fourth if its workspaces take memory:

NAME                    the backend's word in plans and traces
probe(request, key)     -> Verdict; local and cheap, no collective: can this process serve such a request at all
room(request, key)      -> Room; local: the bytes that `bind` will ask for on this rank, voted before anything is
                        allocated. May compile; raises ResourceError where it cannot tell.
bind(channel, request)  -> Workspace; collective over the channel's group. Every step that can fail on one rank is voted
                        through channel.gather, so that a failure is the same ResourceError on every member and nothing
                        that was created stays behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from workbench.backends.busy import Busy
from workbench.fabric import Verdict
from workbench.ops import FusedOutput, Limits, Op, Rounding
from workbench.ranks import GroupKey

__all__ = ["Channel", "Json", "Request", "Room", "Verdict", "Workspace"]

Json = Any  # None, bool, int, float, str, and lists and dicts of these


class Channel(Protocol):
    """The slow, safe way members of one group talk: JSON values over the group's gloo group, with a deadline.

    One per group and rank. `gather` is collective over the group: every member calls it the same number of times.
    `torch_group` is the gloo group of the same members. torch numbers them in its own order (see GroupKey), so a
    backend never takes a place in it for a group rank. Whoever uses it holds `busy`, as `gather` itself does, and says
    so to a `gather` inside.
    """

    key: GroupKey
    world_rank: int
    timeout_s: float
    torch_group: dist.ProcessGroup
    busy: Busy

    def gather(self, value: Json, *, what: str, held: bool = False) -> list[Json]:
        """Every member's value, in group_rank order. Errors name `what`, which is equal on every member.

        held: the caller holds `busy`.
        Raises: DeadlineError or PeerDeadError, naming world ranks.
        """
        ...

    def fail(self, what: str, error: Exception) -> Exception:
        """What every member is to raise for an error of this one that nobody foresaw; the others are told it. Local."""
        ...

    def story(self) -> Exception | None:
        """What every member is to raise since one of them left or failed; None while nobody has. Local: one look."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a group is prepared for. Equal on every member (voted before any backend sees it).

    concurrent_groups: how many groups of a rank have calls under way at one time, on streams of their own.
    algorithm: which of its algorithms the plan chose, as tables call it; "" leaves it to the backend.
    """

    hidden: int
    dtype: torch.dtype
    max_tokens: int
    ops: frozenset[Op]
    rounding: Rounding
    concurrent_groups: int = 1
    algorithm: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes that one rank's workspace takes: of /dev/shm (which count as the host's memory too), and of the GPU's."""

    shm: int = 0
    gpu: int = 0


class Workspace(Protocol):
    """A backend bound to one group. Calls are collective over the group, in the same order on every member.

    Shapes: x, residual [tokens, hidden]; weight [hidden]; 0 <= tokens <= request.max_tokens, equal on every member.
        All contiguous, of request.dtype, on the CPU for CPU backends. Results are fresh tensors.
    Raises: ArgumentError or CapacityError for a call that does not fit, before anything waits; the workspace stays
        good. ArgumentError too where members came with different calls, DeadlineError and PeerDeadError from a wait,
        and what `Channel.story` tells; after these, and after an interrupt, the workspace is broken: each later call is
        a ClosedError that tells the story.
    `empty` is local and gives memory that peers read in place. `close` is local, may be called twice, and leaves
    tensors that are still held readable.
    """

    backend: str
    request: Request
    size_bytes: int

    @property
    def broken(self) -> str:
        """Why each later call is a ClosedError (a failure, close, a fork), or '' while it serves. Local.

        Members of a group may differ for a while: a failure shows on a rank when its own call meets it.
        """
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor: ...

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float, weight_bias: float
    ) -> FusedOutput: ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...

    def close(self) -> None: ...


def limits_of(channel: Channel, request: Request, device: str) -> Limits:
    """What calls of a workspace on such a device must fit."""
    return Limits(
        hidden=request.hidden,
        dtype=request.dtype,
        max_tokens=request.max_tokens,
        group=str(channel.key),
        world_rank=channel.world_rank,
        device=device,
        ops=request.ops,
    )
