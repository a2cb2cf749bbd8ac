"""Memory that the members of a group write into one another: allocated, exchanged, mapped, and given back.

Three ways, tried in this order and voted at each step: what a device's attributes promise is not always permitted.

one host     FD (virtual memory behind a file descriptor), then IPC (ordinary memory)
more hosts   FABRIC (virtual memory of one NVLink clique) or nothing

Virtual memory is freed at close: it lives until the last member has let go of it, in any order. IPC memory must not be
freed while a peer has it mapped, so it stays until every member has closed it and the group meets again, or the process
ends. No way makes multicast objects.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from workbench.backends import custom_abi as abi
from workbench.backends.base import Channel, Json
from workbench.backends.descriptors import DescriptorServer, fetch_descriptor
from workbench.backends.places import host_id
from workbench.backends.vote import vote
from workbench.errors import DeadlineError, ResourceError
from workbench.ranks import GroupKey

SHARES = {abi.FD: "fd", abi.IPC: "ipc", abi.FABRIC: "fabric"}
_retired: dict[GroupKey, dict[int, abi.OwnMemory]] = {}  # IPC, closed here; peers may still have it mapped
_generations: dict[GroupKey, int] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the slots must hold: rows of a sender's plane, and what a row is."""

    rows: int
    hidden: int
    dtype: int


@dataclass(slots=True, kw_only=True)
class SharedSlots:
    """A rank's own memory and every member's slots as this process sees them, in group_rank order."""

    key: GroupKey
    generation: int
    memory: abi.OwnMemory
    slots: list[int] = field(default_factory=list)
    opened: list[int] = field(default_factory=list)

    @property
    def share(self) -> str:
        """fd, ipc or fabric."""
        return SHARES[self.memory.share]

    def close(self) -> None:
        """Unmap the peers' memory and give the own back, IPC memory later. Local; no call may be in flight."""
        for address in self.opened:
            self.memory.close_peer(address)
        self.opened = []
        if self.memory.share == abi.IPC:
            self.memory.close_descriptor()
            _retired.setdefault(self.key, {})[self.generation] = self.memory
        else:
            self.memory.free()


def share_slots(channel: Channel, kernels: abi.Kernels, device: int, shape: Shape) -> SharedSlots:
    """Allocate, exchange and map. Collective over the channel's group; never while a stream captures.

    Raises: ResourceError, alike on every member and with nothing left behind, if a member has other kernels, or if
        every way failed somewhere; it tells each way's reason.
    """
    key = channel.key
    generation = _generations[key] = _generations.get(key, 0) + 1

    def introduce() -> Json:
        return {
            "host": host_id(),
            "kernels": Path(kernels.path).name,
            "closed": sorted(_retired.get(key, {})),
        }

    told = kernel_vote(channel, "meeting of the GPUs", introduce)
    _free_retired(key, told)
    _require_fit(key, told)
    failures = []
    for share in (abi.FD, abi.IPC) if len({answer["host"] for answer in told}) == 1 else (abi.FABRIC,):
        try:
            return _share(channel, kernels, device, shape, share, generation)
        except ResourceError as e:
            failures.append(f"{SHARES[share]} memory: {e}")
    raise ResourceError(f"{key}: no GPU memory can be shared; " + "; ".join(failures))


def _share(
    channel: Channel, kernels: abi.Kernels, device: int, shape: Shape, share: int, generation: int
) -> SharedSlots:
    key = channel.key
    group_rank = key.group_rank(channel.world_rank)
    made: list[SharedSlots] = []
    servers: list[DescriptorServer] = []

    def allocate() -> Json:
        memory = abi.OwnMemory(
            kernels,
            device,
            ranks=key.size,
            rows=shape.rows,
            hidden=shape.hidden,
            dtype=shape.dtype,
            share=share,
        )
        made.append(SharedSlots(key=key, generation=generation, memory=memory))
        if share == abi.FD:
            servers.append(DescriptorServer(memory.handle.fd))
        return {"handle": bytes(memory.handle.bytes).hex(), "fd_at": servers[0].address if servers else ""}

    def attach() -> Json:
        mine = made[0]
        for r, answer in enumerate(told):
            if r == group_rank:
                mine.slots.append(mine.memory.slots)
                continue
            fd = fetch_descriptor(answer["fd_at"], channel.timeout_s) if share == abi.FD else -1
            try:
                mine.opened.append(mine.memory.open_peer(bytes.fromhex(answer["handle"]), fd))
            finally:
                if fd >= 0:
                    os.close(fd)
            mine.slots.append(mine.opened[-1])
        return None

    try:
        told = kernel_vote(channel, "memory for the CUDA kernels", allocate)
        kernel_vote(channel, "mapping the peers' GPU memory", attach)
    except BaseException:
        for shared in made:
            shared.close()
        raise
    finally:
        for server in servers:
            server.close()
    made[0].memory.close_descriptor()
    return made[0]


def kernel_vote(channel: Channel, what: str, attempt: Callable[[], Json]) -> list[Json]:
    """A vote in which what the kernels' library refuses, and a first call that never ends, are failures like others."""

    def as_resource() -> Json:
        try:
            return attempt()
        except (abi.KernelError, torch.cuda.OutOfMemoryError, DeadlineError) as e:
            raise ResourceError(str(e)) from e

    return vote(channel, what, as_resource)


def _free_retired(key: GroupKey, told: list[Json]) -> None:
    """Free own memory of generations that every member has closed: nobody has it mapped any more."""
    mine = _retired.get(key, {})
    for generation in set.intersection(*(set(answer["closed"]) for answer in told)):
        mine.pop(generation).free()


def _require_fit(key: GroupKey, told: list[Json]) -> None:
    """One build of the kernels; the same ResourceError on every member otherwise."""
    kernels = [answer["kernels"] for answer in told]
    if len(set(kernels)) > 1:
        raise ResourceError(f"{key}: members have different kernels: {kernels}")
