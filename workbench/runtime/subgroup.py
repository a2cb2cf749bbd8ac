"""BoundGroup: one group of the map on this rank, with its torch groups, channel, trace lane and workspaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from workbench.backends.base import Request, Workspace
from workbench.plan import Plan
from workbench.ranks import GroupKey, GroupMap
from workbench.runtime.channel import AloneChannel, GlooChannel
from workbench.runtime.members import Member
from workbench.runtime.process_group import TorchGroups
from workbench.trace import Lane


@dataclass(slots=True)
class Prepared:
    """A workspace and the plan it came from."""

    workspace: Workspace
    plan: Plan


@dataclass(slots=True)
class BoundGroup:
    """What a session holds for one rank list."""

    key: GroupKey
    channel: GlooChannel | AloneChannel
    lane: Lane
    prepared: dict[tuple[torch.dtype, int], Prepared] = field(default_factory=dict)
    refused: dict[tuple[str, Request], str] = field(default_factory=dict)
    retired: list[Workspace] = field(default_factory=list)
    frozen: bool = False
    captured: bool = False

    def plan(self, *, tokens: int | None = None) -> Plan | None:
        """The plan prepared last; with `tokens` above its capacity, as it reads for that size. None if unprepared."""
        if not self.prepared:
            return None
        plan = next(reversed(self.prepared.values())).plan
        if tokens is not None and tokens > plan.capacity_tokens and self.frozen and plan.fallback:
            reason = f"{tokens} tokens exceed the {plan.capacity_tokens} of the frozen workspace"
            return replace(plan, choice=plan.fallback.partition(" over ")[0], reason=reason, fallback="")
        if tokens is not None and tokens > plan.capacity_tokens:
            return replace(plan, choice="none", reason=f"{tokens} tokens exceed the {plan.capacity_tokens} prepared")
        return plan

    def check(self) -> None:
        """Raise what a kernel reported. Local: paths that wait on the host have nothing to report later."""
        for prepared in self.prepared.values():
            look = getattr(prepared.workspace, "check", None)
            if look is not None:
                look()

    def put(self, request: Request, prepared: Prepared) -> None:
        """Take `prepared` into use. The workspace it replaces is closed; if a capture may hold it, only at the end."""
        old = self.prepared.pop((request.dtype, request.hidden), None)
        self.prepared[request.dtype, request.hidden] = prepared
        if old is not None and self.captured:
            self.retired.append(old.workspace)
        elif old is not None:
            old.workspace.close()

    def close(self) -> None:
        """Close the workspaces, newest first. Local."""
        while self.prepared:
            self.prepared.popitem()[1].workspace.close()
        while self.retired:
            self.retired.pop().close()


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
