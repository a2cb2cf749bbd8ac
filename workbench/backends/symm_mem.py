"""Backend `symm_mem`: torch's symmetric-memory all-reduce, one-shot or two-shot, then residual-add and norm in torch.

The caller's rows are copied into a buffer that all members have mapped; torch's kernel sums what lies there.
Numerics: torch adds in the order of ranks and in the buffer's own type, so the buffer is fp32 and both rounding classes
hold; only for two members, bf16 and rounding="twice" it is bf16, since one rounded addition is then the contract. First
calls at bind prove it bit by bit, whatever the version of torch.
Needs: 2 to 8 GPUs of one host, TORCH_SYMM_MEM_DISABLE_MULTICAST=1 since before the start (torch makes a multicast
object otherwise), and torch's numbering of the group equal to ours.
The kernels wait without bound: a member that stays away holds the GPUs of the others until the job is ended.
Source: torch.distributed._symmetric_memory of torch 2.11 to 2.13.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from workbench.backends.base import Channel, Request, Room, Verdict, limits_of
from workbench.backends.first_calls import EPS, prove_calls
from workbench.backends.places import require_own_gpus
from workbench.backends.vote import vote
from workbench.errors import ClosedError, ResourceError, WorkbenchError
from workbench.ops import (
    DTYPES,
    FusedOutput,
    Rounding,
    add_rms_norm,
    check_all_reduce,
    check_empty,
    check_fused,
    round_to,
)
from workbench.ranks import GroupKey

NAME = "symm_mem"
MAX_RANKS = 8
ONE_SHOT_BYTES = 128 << 10
"""Largest message for one-shot; on two H200 two-shot was faster from 224 KiB on (benchmarks/2026-11-29-h200x2)."""
NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


def probe(request: Request, key: GroupKey) -> Verdict:
    """Whether this process could serve the group: sizes, multicast switched off, a GPU with room. Local."""
    problem = find_limit(request, key) or find_switch_problem(os.environ.get(NO_MULTICAST, ""))
    problem = problem or ("" if torch.cuda.is_available() else "torch finds no usable GPU")
    return Verdict(not problem, problem or f"{key.size} GPUs, torch symmetric memory")


def room(request: Request, key: GroupKey) -> Room:
    """What a workspace takes of this rank's GPU. Local."""
    return Room(gpu=max(request.max_tokens, 1) * request.hidden * choose_dtype(request, key.size).itemsize)


def bind(channel: Channel, request: Request) -> SymmMemWorkspace:
    """Allocate, meet over exactly the group, look that no multicast address came of it, and prove it on first calls.

    Collective: every member of the channel's group; never while a stream captures.
    Raises: ResourceError, alike on every member and with nothing left behind, if a member shares its GPU, sits on
        another host, cannot allocate or map, or computes otherwise; errors of the channel.
    """
    require_own_gpus(channel)
    made: list[SymmMemWorkspace] = []

    def allocate() -> None:
        made.append(SymmMemWorkspace(channel, request))

    try:
        vote(channel, "symmetric memory", lambda: _as_resource(allocate))
        vote(channel, "the rendezvous of torch's symmetric memory", lambda: _as_resource(lambda: made[0].meet(channel)))
        vote(channel, "a first call over symmetric memory", lambda: _as_resource(lambda: made[0].prove(channel)))
    except BaseException:
        for workspace in made:
            workspace.close()
        raise
    return made[0]


def find_limit(request: Request, key: GroupKey) -> str:
    """Why this path does not serve the request, or ''. Pure."""
    if not 2 <= key.size <= MAX_RANKS:
        return f"{key.size} ranks; torch's symmetric memory serves 2 to {MAX_RANKS} here"
    if key.numbering_differs and key.size > 2:
        return f"torch numbers {key} in another order, and would add in that order"
    if request.dtype not in DTYPES:
        return f"{request.dtype}; this path serves bfloat16, float16 and float32"
    return ""


def find_switch_problem(value: str) -> str:
    """Why torch might make a multicast object, or ''. Pure. value: what NO_MULTICAST is set to."""
    if value == "1":
        return ""
    return f"{NO_MULTICAST} is {value!r}; torch would make a multicast object: set it to 1 before the job starts"


def choose_dtype(request: Request, size: int) -> torch.dtype:
    """The type of the buffer, in which torch adds. Pure."""
    exact = size == 2 and request.dtype is torch.bfloat16 and request.rounding is Rounding.TWICE
    return torch.bfloat16 if exact else torch.float32


class SymmMemWorkspace:
    """One group's buffer. Calls run on the current stream, one stream at a time, and are safe inside a capture."""

    backend = NAME

    def __init__(self, channel: Channel, request: Request) -> None:
        dtype = choose_dtype(request, channel.key.size)
        self.request = request
        self._buffer: torch.Tensor | None = symmetric_memory.empty(
            max(request.max_tokens, 1) * request.hidden,
            dtype=dtype,
            device=torch.device("cuda", torch.cuda.current_device()),
        )
        self.size_bytes = self._buffer.numel() * dtype.itemsize
        self._group_name = channel.torch_group.group_name
        self._handle: Any = None
        self._limits = limits_of(channel, request, "cuda")

    @property
    def broken(self) -> str:
        """As the Workspace protocol says; these kernels report nothing, so only close shows here."""
        return "" if self._buffer is not None else f"{self._limits.group}: this workspace is closed; prepare a new one"

    def meet(self, channel: Channel) -> None:
        """Map every member's buffer. Collective, over the store of the group alone; to be run inside a vote.

        Its waits on the store end with the channel's timeout. Raises: ResourceError for a multicast address.
        """
        assert self._buffer is not None
        with store_deadline(channel.torch_group, channel.timeout_s):
            self._handle = symmetric_memory.rendezvous(self._buffer, self._group_name)
        if int(self._handle.multicast_ptr or 0):
            raise ResourceError(f"torch made a multicast object in spite of {NO_MULTICAST}=1")

    def prove(self, channel: Channel) -> None:
        """First calls, one-shot and two-shot. Collective; to be run inside a vote. Raises: ResourceError."""
        request = self.request
        for one_shot in (True, False):
            if request.max_tokens:
                prove_calls(
                    channel,
                    request,
                    tokens=1,
                    reduce=lambda x, one_shot=one_shot: round_to(self._sum(x, one_shot), request.dtype),  # type: ignore[misc] # bound early
                    fuse=lambda x, r, w, one_shot=one_shot: self._add(self._sum(x, one_shot), r, w, EPS, 0.0),  # type: ignore[misc] # as above
                )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """As the Workspace protocol says. Capture: safe."""
        check_all_reduce(self._limits, x)
        return round_to(self._sum(x, self._is_small(x)), x.dtype)

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float, weight_bias: float
    ) -> FusedOutput:
        """As the Workspace protocol says. Capture: safe."""
        check_fused(self._limits, x, residual, weight, eps, weight_bias)
        return self._add(self._sum(x, self._is_small(x)), residual, weight, eps, weight_bias)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Ordinary device memory: a call copies it into the shared buffer."""
        check_empty(self._limits, shape, dtype)
        return torch.empty(shape, dtype=dtype, device="cuda")

    def close(self) -> None:
        """Give the buffer back; peers that have it mapped keep it alive until they close too. Twice is fine."""
        if self._buffer is not None:
            torch.cuda.synchronize()
            self._handle = self._buffer = None

    def _is_small(self, x: torch.Tensor) -> bool:
        return x.numel() * x.dtype.itemsize <= ONE_SHOT_BYTES

    def _sum(self, x: torch.Tensor, one_shot: bool) -> torch.Tensor:
        """The sum in fp32; it may lie in the shared buffer, which the next call overwrites."""
        if self._buffer is None:
            raise ClosedError(self.broken)
        rows = self._buffer[: x.numel()].view(x.shape)
        if x.numel():
            rows.copy_(x)
            run = torch.ops.symm_mem.one_shot_all_reduce if one_shot else torch.ops.symm_mem.two_shot_all_reduce_
            rows = run(rows, "sum", self._group_name)
        return rows.float()

    def _add(
        self, total: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_bias: float
    ) -> FusedOutput:
        return add_rms_norm(total, residual, weight, eps=eps, weight_bias=weight_bias, rounding=self.request.rounding)


@contextmanager
def store_deadline(group: dist.ProcessGroup, timeout_s: float) -> Iterator[None]:
    """Let waits on the group's store end after `timeout_s`: torch's rendezvous takes no deadline of its own."""
    store: Any = dist.distributed_c10d._get_process_group_store(group)
    before = store.timeout
    store.set_timeout(timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        store.set_timeout(before)


def _as_resource(attempt: Callable[[], None]) -> None:
    """Run it; what torch raises becomes a ResourceError that a vote can carry."""
    try:
        attempt()
    except WorkbenchError:
        raise
    except RuntimeError as e:
        raise ResourceError(f"{type(e).__name__}: {e}") from e
