"""Backend `custom`: our CUDA push kernels over NVLink, for 2 to 16 GPUs of one host.

The protocols are told in kernels_ext/cuda/push.cuh and two_shot.cuh. custom_memory shares the memory; here each link is
proved with one small call before anyone relies on it, and a kernel's report of a missing peer becomes an exception with
its world rank.
"""

from __future__ import annotations

import itertools
import weakref
from pathlib import Path

import torch

from workbench.backends import custom_abi as abi
from workbench.backends.base import Channel, Request, Room, Verdict, limits_of
from workbench.backends.custom_build import build_cuda, why_no_kernels
from workbench.backends.custom_memory import Shape, SharedSlots, kernel_vote, share_slots
from workbench.errors import ClosedError, DeadlineError, ResourceError
from workbench.ops import FusedOutput, Op, Rounding, check_all_reduce, check_empty, check_fused
from workbench.ranks import GroupKey

NAME = "custom"
_ALGORITHM_CODES = {"push": abi.PUSH, "two_shot_push": abi.TWO_SHOT_PUSH}
ALGORITHMS = tuple(_ALGORITHM_CODES)  # values of plan.Algorithm with kernels here, with and without the norm
DTYPE_CODES = {torch.bfloat16: abi.BF16, torch.float16: abi.FP16, torch.float32: abi.FP32}
_OP_CODES = {Op.ALL_REDUCE: abi.ALL_REDUCE, Op.ALL_REDUCE_ADD_RMS_NORM: abi.ADD_NORM}
_OP_NAMES = {code: op.value for op, code in _OP_CODES.items()}
_workspaces: weakref.WeakValueDictionary[int, CustomWorkspace] = weakref.WeakValueDictionary()
_handles = itertools.count(1)


def probe(request: Request, key: GroupKey) -> Verdict:
    """Whether this process could serve the group: GPU, ranks, dtype, hidden size, compiler. Local."""
    if not torch.cuda.is_available():
        return Verdict(False, "torch finds no usable GPU")
    arch = torch.cuda.get_device_capability()
    if arch[0] not in (9, 10) or arch[1] != 0:
        return Verdict(False, f"compute capability {arch[0]}.{arch[1]}; the kernels are compiled for 9.0 and 10.0")
    if not 2 <= key.size <= abi.MAX_RANKS:
        return Verdict(False, f"{key.size} ranks; the kernels serve 2 to {abi.MAX_RANKS}")
    if request.dtype not in DTYPE_CODES:
        return Verdict(False, f"{request.dtype}; the kernels serve bfloat16, float16 and float32")
    if request.algorithm not in ("", *ALGORITHMS):
        return Verdict(False, f"no kernel for algorithm {request.algorithm}; there are {', '.join(ALGORITHMS)}")
    if request.hidden % 8 or not 8 <= request.hidden <= 16384:
        return Verdict(False, f"hidden {request.hidden}; the kernels serve multiples of 8 up to 16384")
    if missing := why_no_kernels(_arch_name()):
        return Verdict(False, missing)
    return Verdict(True, f"{key.size} GPUs, push kernels")


def room(request: Request, key: GroupKey) -> Room:
    """The bytes of this rank's slots: two halves, a plane for every peer in each. Local."""
    itemsize = request.dtype.itemsize
    return Room(gpu=abi.slot_bytes(_plane_rows(request, key.size), request.hidden, itemsize, key.size))


def bind(channel: Channel, request: Request) -> CustomWorkspace:
    """Allocate, exchange handles, map the peers' memory, and prove every link with one call.

    Rows wait for one another across GPUs, so those of all calls that run at one time must fit on each device, and a
    stream's next call takes its place beside the last: with request.concurrent_groups above one each group gets a part
    of the device. Make each call once before they overlap: the first use of any kernel loads it, and loading may wait
    for the device.
    Collective: every member of the channel's group; never while a stream captures.
    Raises: ResourceError, alike on every member and with nothing left behind, if a member cannot compile or allocate,
        sits on another host, cannot map a peer, or does not see a peer's data.
    """
    device = torch.cuda.current_device()
    kernels: list[abi.Kernels] = []
    kernel_vote(channel, "the CUDA kernels", lambda: kernels.append(_kernels(build_cuda(_arch_name()))))
    shape = Shape(
        rows=_plane_rows(request, channel.key.size),
        hidden=request.hidden,
        dtype=DTYPE_CODES[request.dtype],
    )
    shared = share_slots(channel, kernels[0], device, shape)
    workspace = CustomWorkspace(channel, request, shape, shared)
    try:
        lanes = kernel_vote(channel, "room for the CUDA kernels", workspace.resident_lanes)
        share = 1 if request.concurrent_groups == 1 else 2 * request.concurrent_groups
        workspace.limit_lanes([max(1, min(column) // share) for column in zip(*lanes, strict=True)])
        kernel_vote(channel, "a first call over NVLink", workspace.prove)
    except BaseException:
        workspace.close()
        raise
    _workspaces[workspace.handle] = workspace
    return workspace


class CustomWorkspace:
    """One group's workspace. Calls run on the current stream, one stream at a time, and are safe inside a capture."""

    backend = NAME

    def __init__(self, channel: Channel, request: Request, shape: Shape, shared: SharedSlots) -> None:
        self.request, self.handle, self.size_bytes = request, next(_handles), shared.memory.size_bytes
        self._key, self._world_rank = channel.key, channel.world_rank
        self._group_rank = channel.key.group_rank(channel.world_rank)
        self._shared, self._memory = shared, shared.memory
        self._failure = ""
        self._closed = False
        self._limits = limits_of(channel, request, "cuda")
        self._calls = {
            (op, algorithm, cluster): self._template(op, algorithm, cluster, shape, channel.timeout_s)
            for op in Op
            for algorithm in _ALGORITHM_CODES.values()
            for cluster in abi.clusters(request.hidden, request.dtype.itemsize)
        }
        self._resident = dict.fromkeys(self._calls, 0)

    @property
    def broken(self) -> str:
        """As the Workspace protocol says; a failure shows here once its kernel has ended."""
        if self._closed:
            return f"{self._key}: this workspace is closed; prepare a new one"
        failure = self._failure or self._read_report()[0]
        return f"{self._key}: this workspace is broken by an earlier failure: {failure}" if failure else ""

    @property
    def memory_kind(self) -> str:
        """How the members share their memory: fd, ipc or fabric."""
        return self._shared.share

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """As the Workspace protocol says. Capture: safe."""
        check_all_reduce(self._limits, x)
        if torch.compiler.is_compiling():
            total: torch.Tensor = torch.ops.workbench.custom_all_reduce(x, self.handle)
            return total
        return self.run_all_reduce(x)

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float, weight_bias: float
    ) -> FusedOutput:
        """As the Workspace protocol says. Capture: safe."""
        check_fused(self._limits, x, residual, weight, eps, weight_bias)
        if torch.compiler.is_compiling():
            op = torch.ops.workbench.custom_all_reduce_add_rms_norm
            return FusedOutput(*op(x, residual, weight, eps, weight_bias, self.handle))
        return FusedOutput(*self.run_fused(x, residual, weight, eps, weight_bias))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Ordinary device memory: these kernels push, so they read any."""
        check_empty(self._limits, shape, dtype)
        return torch.empty(shape, dtype=dtype, device="cuda")

    def check(self) -> None:
        """Raise what a kernel of this workspace reported. Local; sees calls whose kernels have ended.

        Raises: DeadlineError naming the peer's world rank the first time; ClosedError afterwards and after close.
        """
        if self._closed or self._failure:
            raise ClosedError(self.broken)
        self._failure, missing = self._read_report()
        if self._failure:
            raise DeadlineError(self._failure, missing=missing)

    def _read_report(self) -> tuple[str, tuple[int, ...]]:
        """What a kernel reported, in words, and the world ranks it waited for in vain; '' and () if none did."""
        report = self._memory.report
        if not report.valid:
            return "", ()
        peer = self._key.world_rank(report.peer)
        return (
            f"{self._key}: world rank {self._world_rank} waited longer than its bound for world rank {peer} in call "
            f"{report.epoch} ({_OP_NAMES.get(report.op, report.op)}, row {report.row}): expected epoch "
            f"{report.expected}, seen {report.seen}"
        ), (peer,)

    def close(self) -> None:
        """Unmap the peers' memory and give the own back (custom_memory tells when). Waits for this device's work."""
        if self._closed:
            return
        self._closed = True
        torch.cuda.synchronize()
        self._shared.close()

    def run_all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The launch behind all_reduce; arguments are checked already."""
        total = torch.empty_like(x)
        self._launch(Op.ALL_REDUCE, x, None, None, total, None, 0.0, 0.0)
        return total

    def run_fused(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_bias: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The launch behind all_reduce_add_rms_norm: (norm, sum)."""
        norm, total = torch.empty_like(x), torch.empty_like(x)
        self._launch(Op.ALL_REDUCE_ADD_RMS_NORM, x, residual, weight, total, norm, eps, weight_bias)
        return norm, total

    def resident_lanes(self) -> list[int]:
        """Rows that this device runs at one time, for each kind of call."""
        return [self._memory.kernels.resident_lanes(call) for call in self._calls.values()]

    def limit_lanes(self, lanes: list[int]) -> None:
        """Rows at one time, for each kind of call; equal on every member. Two GPUs of one model can differ."""
        self._resident = dict(zip(self._calls, lanes, strict=True))

    def prove(self) -> None:
        """One all-reduce of one row that tells the members apart. Collective. Raises ResourceError for a wrong sum."""
        size = self._key.size
        shape = (min(1, self.request.max_tokens), self.request.hidden)
        x = torch.full(shape, float(self._group_rank + 1), dtype=self.request.dtype, device="cuda")
        total = self.run_all_reduce(x)
        torch.cuda.synchronize()
        self.check()
        want = size * (size + 1) / 2
        if not bool((total == want).all()):
            raise ResourceError(f"the first sum is {total.flatten()[0].item()} and not {want}")

    def _template(self, op: Op, algorithm: int, cluster: int, shape: Shape, timeout_s: float) -> abi.Call:
        request = self.request
        call = abi.Call(
            op=_OP_CODES[op],
            dtype=DTYPE_CODES[request.dtype],
            ranks=self._key.size,
            first_rank=self._group_rank,
            hidden=request.hidden,
            plane_rows=shape.rows,
            algorithm=algorithm,
            cluster=cluster,
            round_twice=int(request.rounding is Rounding.TWICE),
            pdl=1,
            timeout_ns=int(timeout_s * 1e9),
        )
        for r, address in enumerate(self._shared.slots):
            call.slots[r] = address
        self._memory.fill(call.rank[0])
        return call

    def _launch(
        self,
        op: Op,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        total: torch.Tensor,
        norm: torch.Tensor | None,
        eps: float,
        weight_bias: float,
    ) -> None:
        self.check()
        held = [_aligned(t) for t in (x, residual, weight)]
        request = self.request
        asked = _ALGORITHM_CODES.get(request.algorithm)
        choice = abi.choose(x.shape[0], request.hidden, request.dtype.itemsize, self._key.size, asked)
        kind = op, choice.algorithm, choice.cluster
        call, resident = self._calls[kind], self._resident[kind]
        call.max_lanes, call.trigger = min(choice.max_lanes or resident, resident), choice.trigger
        call.tokens, call.eps, call.weight_bias = x.shape[0], eps, weight_bias
        rank = call.rank[0]
        rank.x, rank.residual, call.weight = (None if t is None else t.data_ptr() for t in held)
        rank.sum, rank.norm = total.data_ptr(), None if norm is None else norm.data_ptr()
        self._memory.kernels.push(call, torch.cuda.current_stream().cuda_stream)


def _plane_rows(request: Request, ranks: int) -> int:
    asked = _ALGORITHM_CODES.get(request.algorithm)
    return abi.plane_rows(request.max_tokens, request.hidden, request.dtype.itemsize, ranks, asked)


def _arch_name() -> str:
    return "{}{}a".format(*torch.cuda.get_device_capability())


def _aligned(t: torch.Tensor | None) -> torch.Tensor | None:
    return t if t is None or t.data_ptr() % 16 == 0 else t.clone()


_loaded: dict[Path, abi.Kernels] = {}


def _kernels(path: Path) -> abi.Kernels:
    if path not in _loaded:
        _loaded[path] = abi.Kernels(path)
    return _loaded[path]


_ops = torch.library.Library("workbench", "FRAGMENT")  # type: ignore[no-untyped-call] # torch has no types here
_ops.define("custom_all_reduce(Tensor x, int workspace) -> Tensor")  # type: ignore[no-untyped-call] # as above
_ops.define(  # type: ignore[no-untyped-call] # as above
    "custom_all_reduce_add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, float weight_bias, "
    "int workspace) -> (Tensor, Tensor)"
)


def _workspace(handle: int) -> CustomWorkspace:
    found = _workspaces.get(handle)
    if found is None:
        raise ClosedError(f"workspace {handle} of a compiled call is gone; prepare a new one and compile again")
    return found


def _op_all_reduce(x: torch.Tensor, workspace: int) -> torch.Tensor:
    return _workspace(workspace).run_all_reduce(x)


def _op_fused(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_bias: float, workspace: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _workspace(workspace).run_fused(x, residual, weight, eps, weight_bias)


def _fake_all_reduce(x: torch.Tensor, workspace: int) -> torch.Tensor:  # noqa: ARG001 - the op's signature
    return torch.empty_like(x)


def _fake_fused(
    x: torch.Tensor,
    residual: torch.Tensor,  # noqa: ARG001 - the op's signature
    weight: torch.Tensor,  # noqa: ARG001
    eps: float,  # noqa: ARG001
    weight_bias: float,  # noqa: ARG001
    workspace: int,  # noqa: ARG001
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


_ops.impl("custom_all_reduce", _op_all_reduce, "CUDA")  # type: ignore[no-untyped-call] # as above
_ops.impl("custom_all_reduce_add_rms_norm", _op_fused, "CUDA")  # type: ignore[no-untyped-call] # as above
torch.library.register_fake("workbench::custom_all_reduce", _fake_all_reduce, lib=_ops)
torch.library.register_fake("workbench::custom_all_reduce_add_rms_norm", _fake_fused, lib=_ops)
