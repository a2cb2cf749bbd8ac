"""Backend `nccl_window`: as nccl, but between buffers that NCCL has registered as symmetric windows.

NCCL then gathers with its one-step kernels, which read and write the members' windows over NVLink directly. The sum and
the norm are those of backend nccl, so both rounding classes hold. The caller's rows are copied into the window first.
Needs: GPUs of one host, NCCL 2.27.3 or newer, a torch that registers memory pools, and NCCL_NVLS_ENABLE=0 since before
the start: NCCL would bind the windows to a multicast object otherwise.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from workbench.backends.base import Request, Room, Verdict
from workbench.backends.nccl import NcclWorkspace, _DeviceChannel
from workbench.backends.nccl import probe as probe_nccl
from workbench.backends.places import require_own_gpus
from workbench.backends.vote import vote
from workbench.defects import NCCL, find_refusal
from workbench.errors import ResourceError
from workbench.ops import sum_fp32
from workbench.ranks import GroupKey

NAME = "nccl_window"
NO_MULTICAST = "NCCL_NVLS_ENABLE"


def probe(request: Request, key: GroupKey) -> Verdict:
    """Whether this process could serve the group: NCCL and its version, multicast switched off, room. Local."""
    verdict = probe_nccl(request, key)
    if not verdict.ok:
        return verdict
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call] # torch has no types here
    problem = find_refusal(NCCL, version) or find_switch_problem(os.environ.get(NO_MULTICAST, ""))
    return Verdict(not problem, problem or f"NCCL {version}, symmetric windows")


def room(request: Request, key: GroupKey) -> Room:
    """What the windows take of this rank's GPU. Local."""
    return Room(gpu=_window_bytes(request, key.size))


def bind(channel: _DeviceChannel, request: Request) -> NcclWindowWorkspace:
    """Allocate the windows and register them with the group's communicator.

    Collective: every member of the channel's group; never while a stream captures.
    Raises: ResourceError, alike on every member and with nothing left behind, if a member shares its GPU, sits on
        another host, cannot allocate or register; errors of the channel.
    """
    require_own_gpus(channel)
    made: list[NcclWindowWorkspace] = []
    try:
        vote(channel, "memory for NCCL's windows", lambda: made.append(_allocate(channel, request)))
        vote(channel, "registering NCCL's windows", lambda: _register(made[0]))
    except BaseException:
        for workspace in made:
            workspace.close()
        raise
    return made[0]


def find_switch_problem(value: str) -> str:
    """Why NCCL might make a multicast object, or ''. Pure. value: what NO_MULTICAST is set to."""
    if value == "0":
        return ""
    return f"{NO_MULTICAST} is {value!r}; NCCL would make a multicast object: set it to 0 before the job starts"


class NcclWindowWorkspace(NcclWorkspace):
    """As NcclWorkspace, gathering from one registered buffer into another. One stream at a time; safe in a capture."""

    backend = NAME

    def __init__(self, channel: _DeviceChannel, request: Request) -> None:
        super().__init__(channel, request)
        size, rows = channel.key.size, max(request.max_tokens, 1)
        self.size_bytes = _window_bytes(request, size)
        self._nccl: Any = channel.data_group._get_backend(torch.device("cuda"))
        self._registered = False
        self._pool: torch.cuda.MemPool | None = torch.cuda.MemPool(self._nccl.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            self._windows: torch.Tensor | None = torch.empty(
                (1 + size) * rows * request.hidden, dtype=request.dtype, device="cuda"
            )

    def register(self) -> None:
        """Connect the communicator and register the pool. Collective. Raises: what torch raises."""
        dist.all_reduce(torch.zeros(1, device="cuda"), group=self._open_group())
        self._nccl.register_mem_pool(self._pool, symm=True)
        self._registered = True
        torch.cuda.synchronize()

    def close(self) -> None:
        """Deregister the windows and give their memory back. Twice is fine."""
        super().close()
        if self._windows is None:
            return
        torch.cuda.synchronize()
        if self._registered:
            self._nccl.deregister_mem_pool(self._pool)
        self._windows = self._pool = self._nccl = None

    def _sum(self, group: dist.ProcessGroup, x: torch.Tensor) -> torch.Tensor:
        assert self._windows is not None
        count = x.numel()
        mine = self._windows[:count]
        start = max(self.request.max_tokens, 1) * self.request.hidden
        gathered = self._windows[start : start + count * len(self._place)]
        if count:
            mine.copy_(x.view(-1))
            dist.all_gather_into_tensor(gathered, mine, group=group)
        parts = gathered.view(len(self._place), *x.shape)
        return sum_fp32([parts[p] for p in self._place])


def _window_bytes(request: Request, size: int) -> int:
    return (1 + size) * max(request.max_tokens, 1) * request.hidden * request.dtype.itemsize


def _allocate(channel: _DeviceChannel, request: Request) -> NcclWindowWorkspace:
    try:
        return NcclWindowWorkspace(channel, request)
    except RuntimeError as e:
        raise ResourceError(f"{type(e).__name__}: {e}") from e


def _register(workspace: NcclWindowWorkspace) -> None:
    try:
        workspace.register()
    except (RuntimeError, TypeError, AttributeError) as e:  # the latter two: a torch that knows no symmetric pools
        raise ResourceError(f"{type(e).__name__}: {e}") from e
