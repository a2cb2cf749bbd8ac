"""Backend `custom`: our CUDA push kernels over NVLink, for 2 to 16 GPUs of one host.

The protocol is told in kernels_ext/cuda/push.cuh. Python shares the memory (CUDA IPC), proves each link with one small
call before anyone relies on it, and turns a kernel's report of a missing peer into an exception with its world rank.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from workbench.backends import custom_abi as abi
from workbench.backends.base import Channel, Json, Request, Verdict
from workbench.backends.custom_build import build_cuda, why_no_kernels
from workbench.backends.vote import vote
from workbench.errors import ClosedError, DeadlineError, ResourceError
from workbench.ops import FusedOutput, Limits, Op, Rounding, check_all_reduce, check_empty, check_fused
from workbench.ranks import GroupKey

NAME = "custom"
ALGORITHMS = ("push",)  # values of plan.Algorithm that this build has kernels for, with and without the norm
DTYPE_CODES = {torch.bfloat16: abi.BF16, torch.float16: abi.FP16, torch.float32: abi.FP32}
_OP_CODES = {Op.ALL_REDUCE: abi.ALL_REDUCE, Op.ALL_REDUCE_ADD_RMS_NORM: abi.ADD_NORM}
_OP_NAMES = {code: op.value for op, code in _OP_CODES.items()}
_workspaces: weakref.WeakValueDictionary[int, CustomWorkspace] = weakref.WeakValueDictionary()
_handles = itertools.count(1)
_generations: dict[GroupKey, int] = {}
_retired: dict[GroupKey, dict[int, abi.OwnMemory]] = {}  # closed here; peers may still have it mapped


def probe(request: Request, key: GroupKey) -> Verdict:
    """Whether this process could serve the group: GPU, ranks, dtype, hidden size, compiler, free memory. Local."""
    if not torch.cuda.is_available():
        return Verdict(False, "torch finds no usable GPU")
    arch = torch.cuda.get_device_capability()
    if arch[0] not in (9, 10) or arch[1] != 0:
        return Verdict(False, f"compute capability {arch[0]}.{arch[1]}; the kernels are compiled for 9.0 and 10.0")
    if not 2 <= key.size <= abi.MAX_RANKS:
        return Verdict(False, f"{key.size} ranks; the kernels serve 2 to {abi.MAX_RANKS}")
    if request.dtype not in DTYPE_CODES:
        return Verdict(False, f"{request.dtype}; the kernels serve bfloat16, float16 and float32")
    if request.hidden % 8 or not 8 <= request.hidden <= 16384:
        return Verdict(False, f"hidden {request.hidden}; the kernels serve multiples of 8 up to 16384")
    if missing := why_no_kernels(_arch_name()):
        return Verdict(False, missing)
    needed = 2 * (key.size - 1) * request.max_tokens * request.hidden * request.dtype.itemsize
    free = torch.cuda.mem_get_info()[0]
    if free < needed:
        return Verdict(False, f"{free} bytes free on the GPU, {needed} are needed")
    return Verdict(True, f"{key.size} GPUs, push kernels")


def bind(channel: Channel, request: Request) -> CustomWorkspace:
    """Allocate, exchange handles, map the peers' memory, and prove every link with one call.

    Collective: every member of the channel's group; never while a stream captures.
    Raises: ResourceError, alike on every member and with nothing left behind, if a member cannot compile or allocate,
        sits on another host, shares its GPU with another member, cannot map a peer, or does not see a peer's data.
    """
    key, device = channel.key, torch.cuda.current_device()
    group_rank = key.group_rank(channel.world_rank)
    generation = _generations[key] = _generations.get(key, 0) + 1
    mine: list[abi.OwnMemory] = []
    opened: list[int] = []

    def allocate() -> Json:
        library = build_cuda(_arch_name())
        kernels = _kernels(library)
        _, _, uuid = kernels.device(device)
        memory = abi.OwnMemory(
            kernels,
            device,
            ranks=key.size,
            capacity=max(request.max_tokens, 1),
            hidden=request.hidden,
            dtype=DTYPE_CODES[request.dtype],
        )
        mine.append(memory)
        return {
            "handle": kernels.export(memory.slots).hex(),
            "gpu": uuid,
            "host": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "pid": os.getpid(),
            "kernels": library.name,
            "closed": sorted(_retired.get(key, {})),
        }

    try:
        told = vote(channel, "memory for the CUDA kernels", lambda: _as_resource(allocate))
        _free_retired(key, told)
        _require_fit(key, told)

        def attach() -> Json:
            slots = []
            for r, answer in enumerate(told):
                if r == group_rank:
                    slots.append(mine[0].slots)
                else:
                    opened.append(mine[0].kernels.open(device, bytes.fromhex(answer["handle"])))
                    slots.append(opened[-1])
            workspace = CustomWorkspace(channel, request, mine[0], slots, opened, generation)
            return [workspace, workspace.resident_lanes()]

        made: list[CustomWorkspace] = []

        def attach_and_tell() -> Json:
            workspace, lanes = attach()
            made.append(workspace)
            return lanes

        lanes = vote(channel, "mapping the peers' GPU memory", lambda: _as_resource(attach_and_tell))
        made[0].limit_lanes([min(column) for column in zip(*lanes, strict=True)])
        vote(channel, "a first call over NVLink", lambda: _as_resource(made[0].prove))
    except BaseException:
        torch.cuda.synchronize()
        for address in opened:
            mine[0].kernels.close(device, address)
        if mine:
            _retired.setdefault(key, {})[generation] = mine[0]
        raise
    _workspaces[made[0].handle] = made[0]
    return made[0]


class CustomWorkspace:
    """One group's workspace. Calls run on the current stream, one stream at a time, and are safe inside a capture."""

    backend = NAME

    def __init__(
        self,
        channel: Channel,
        request: Request,
        memory: abi.OwnMemory,
        slots: list[int],
        opened: list[int],
        generation: int,
    ) -> None:
        self.request, self.handle, self.size_bytes = request, next(_handles), memory.size_bytes
        self._key, self._world_rank = channel.key, channel.world_rank
        self._group_rank = channel.key.group_rank(channel.world_rank)
        self._memory, self._opened, self._generation = memory, opened, generation
        self._failure = ""
        self._closed = False
        self._limits = Limits(
            hidden=request.hidden,
            dtype=request.dtype,
            max_tokens=request.max_tokens,
            group=str(channel.key),
            world_rank=channel.world_rank,
            device="cuda",
            ops=request.ops,
        )
        self._calls = {
            (op, cluster): self._template(op, cluster, slots, channel.timeout_s)
            for op in Op
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
        """Unmap the peers' memory. Own memory goes back when every member has closed too and the group binds anew."""
        if self._closed:
            return
        self._closed = True
        torch.cuda.synchronize()
        for address in self._opened:
            self._memory.kernels.close(self._memory.device, address)
        _retired.setdefault(self._key, {})[self._generation] = self._memory

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
        """Take what every member can run: two GPUs of one model can differ."""
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

    def _template(self, op: Op, cluster: int, slots: list[int], timeout_s: float) -> abi.Call:
        request = self.request
        call = abi.Call(
            op=_OP_CODES[op],
            dtype=DTYPE_CODES[request.dtype],
            ranks=self._key.size,
            first_rank=self._group_rank,
            hidden=request.hidden,
            capacity=max(request.max_tokens, 1),
            cluster=cluster,
            round_twice=int(request.rounding is Rounding.TWICE),
            pdl=1,
            timeout_ns=int(timeout_s * 1e9),
        )
        for r, address in enumerate(slots):
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
        choice = abi.choose(x.shape[0], self.request.hidden, self.request.dtype.itemsize)
        call, resident = self._calls[op, choice.cluster], self._resident[op, choice.cluster]
        call.max_lanes, call.trigger = min(choice.max_lanes or resident, resident), choice.trigger
        call.tokens, call.eps, call.weight_bias = x.shape[0], eps, weight_bias
        rank = call.rank[0]
        rank.x, rank.residual, call.weight = (None if t is None else t.data_ptr() for t in held)
        rank.sum, rank.norm = total.data_ptr(), None if norm is None else norm.data_ptr()
        self._memory.kernels.push(call, torch.cuda.current_stream().cuda_stream)


def _arch_name() -> str:
    return "{}{}a".format(*torch.cuda.get_device_capability())


def _aligned(t: torch.Tensor | None) -> torch.Tensor | None:
    return t if t is None or t.data_ptr() % 16 == 0 else t.clone()


def _as_resource(attempt: Callable[[], Json]) -> Json:
    """Run it; what the kernels' library or a first call refuses becomes a ResourceError that a vote can carry."""
    try:
        return attempt()
    except (abi.KernelError, torch.cuda.OutOfMemoryError, DeadlineError) as e:
        raise ResourceError(str(e)) from e


_loaded: dict[Path, abi.Kernels] = {}


def _kernels(path: Path) -> abi.Kernels:
    if path not in _loaded:
        _loaded[path] = abi.Kernels(path)
    return _loaded[path]


def _free_retired(key: GroupKey, told: list[Json]) -> None:
    """Free own memory of generations that every member has closed: nobody has it mapped any more."""
    mine = _retired.get(key, {})
    for generation in set.intersection(*(set(answer["closed"]) for answer in told)):
        mine.pop(generation).free()


def _require_fit(key: GroupKey, told: list[Json]) -> None:
    """One host, one build of the kernels, one GPU a member; the same ResourceError on every member otherwise."""
    for name, why in (("host", "on different hosts"), ("kernels", "with different kernels")):
        if len({answer[name] for answer in told}) > 1:
            raise ResourceError(f"{key}: members are {why}: {[answer[name] for answer in told]}")
    gpus = [answer["gpu"] for answer in told]
    if len(set(gpus)) < len(gpus):
        raise ResourceError(f"{key}: two members share one GPU ({gpus}); give each member its own")


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
