"""BoundGroup: one group of the map on this rank, with its torch groups, channel, trace lane and workspaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from workbench.backends.base import Request
from workbench.backends.vote import vote
from workbench.fabric import Fabric
from workbench.ops import Limits
from workbench.plan import Plan
from workbench.ranks import GroupKey, GroupMap
from workbench.runtime.channel import AloneChannel, GlooChannel
from workbench.runtime.members import Member
from workbench.runtime.prepared import Prepared
from workbench.runtime.process_group import TorchGroups
from workbench.trace import Lane


@dataclass(slots=True)
class BoundGroup:
    """What a session holds for one rank list."""

    key: GroupKey
    channel: GlooChannel | AloneChannel
    lane: Lane
    prepared: dict[tuple[torch.dtype, int], Prepared] = field(default_factory=dict)
    refused: dict[Request, dict[str, str]] = field(default_factory=dict)
    retired: list[Prepared] = field(default_factory=list)
    fabric: Fabric | None = None
    frozen: bool = False
    captured: bool = False

    def plan(self, *, tokens: int | None = None) -> Plan | None:
        """The plan of what was prepared last, as it reads for so many tokens. None if unprepared."""
        return next(reversed(self.prepared.values())).plan(tokens) if self.prepared else None

    def check(self) -> None:
        """Raise what a kernel reported. Local."""
        for prepared in self.prepared.values():
            prepared.check()

    def put(self, prepared: Prepared) -> None:
        """Take `prepared` into use. What it replaces is closed; if a capture may hold it, only at the end."""
        key = (prepared.request.dtype, prepared.request.hidden)
        old = self.prepared.pop(key, None)
        self.prepared[key] = prepared
        if old is not None and self.captured:
            self.retired.append(old)
        elif old is not None:
            old.close()

    def close_together(self) -> None:
        """Close once every member has come to. Collective over the group; raises alike on every member."""
        if isinstance(self.channel, GlooChannel):
            self.channel.barrier(what="close")
            vote(self.channel, "close", self.close)

    def close(self) -> None:
        """Close the workspaces, newest first. Local."""
        while self.prepared:
            self.prepared.popitem()[1].close()
        while self.retired:
            self.retired.pop().close()


def limits_of(group: BoundGroup, request: Request, max_tokens: int | None = None) -> Limits:
    """What a call must fit that `request` was prepared for; of any other number of tokens, if one is given."""
    return Limits(
        hidden=request.hidden,
        dtype=request.dtype,
        max_tokens=request.max_tokens if max_tokens is None else max_tokens,
        group=str(group.key),
        world_rank=group.channel.world_rank,
        device=group.channel.device,
        ops=request.ops,
    )


def bind_group(
    key: GroupKey,
    groups: TorchGroups | None,
    members: Mapping[int, Member],
    *,
    world_rank: int,
    device: str,
    store: dist.Store,
    timeout_s: float,
    lane: Lane,
) -> BoundGroup:
    """The bound group of `key` for this rank. Local."""
    if groups is None:
        return BoundGroup(key, AloneChannel(key, device=device, timeout_s=timeout_s), lane)
    channel = GlooChannel(key, groups=groups, store=store, members=members, world_rank=world_rank, timeout_s=timeout_s)
    return BoundGroup(key, channel, lane)


@dataclass(frozen=True, slots=True)
class OwnGroup:
    """One distinct group that holds this rank: its key, all its kinds as text, its place in the order of creation."""

    key: GroupKey
    kinds: str
    ordinal: int


def own_groups(group_map: GroupMap, world_rank: int) -> list[OwnGroup]:
    """The distinct groups that hold `world_rank`, in creation order. Pure.

    Kinds with equal lists are one group here, which goes by the first of them that is not the world and is labelled
    with all ("attn_cp=moe_ep").
    """
    kinds: dict[tuple[int, ...], list[str]] = {}
    for kind, lists in group_map.groups.items():
        for ranks in lists:
            kinds.setdefault(ranks, []).append(kind)
    return [
        OwnGroup(GroupKey(next((n for n in names if n != "world"), "world"), ranks), "=".join(names), ordinal)
        for ordinal, (ranks, names) in enumerate(kinds.items())
        if world_rank in ranks
    ]
