"""Backend `flashinfer`: its `trtllm` kernels, the all-reduce fusion that needs no multicast, for comparison and use.

Always with a rendezvous of our own over exactly the group (flashinfer_comm.py), one workspace a group, capacity asked
from the workspace, and a choice of one-shot or two-shot that is ours and therefore the same on every member.

Numerics: fp32 sum in group_rank order, rounded to T, residual added, rounded again: rounding="twice"; with fp32 both
classes are one. Not within the contract: a sum of -0.0 comes back as +0.0 (their sentinel), and subnormal bf16 and fp32
values may be flushed (they compile with fast math).
Needs: 2, 4, 8 or 16 GPUs of one host, Hopper or Blackwell; rows of a multiple of 16 bytes.
The kernels wait without bound: a member that stays away holds the GPUs of the others until the job is ended.
Source: flashinfer-python 0.7.2.post1; its interface is pinned by tests/backends/test_flashinfer_interface.py.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from workbench.backends.base import Channel, Request, Room, Verdict, limits_of
from workbench.backends.first_calls import EPS, prove_calls
from workbench.backends.flashinfer_comm import ChannelComm, create_together
from workbench.backends.places import require_own_gpus
from workbench.backends.vote import vote
from workbench.defects import FLASHINFER, find_refusal
from workbench.errors import ClosedError, ResourceError, WorkbenchError
from workbench.ops import FusedOutput, Op, Rounding, check_all_reduce, check_empty, check_fused
from workbench.ranks import GroupKey

NAME = "flashinfer"
PARAMETERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "create_allreduce_fusion_workspace": (
            *("backend", "world_size", "rank", "max_token_num", "hidden_dim", "dtype", "comm_backend"),
        ),
        "allreduce_fusion": (
            *("input", "workspace", "pattern", "launch_with_pdl", "output", "residual_in", "residual_out", "norm_out"),
            *("rms_gamma", "rms_eps", "use_oneshot", "fp32_acc", "weight_bias"),
        ),
    }
)
"""What we pass by name; `group` besides, where the installed version takes it."""

SIZES = (2, 4, 8, 16)
MAX_LAMPORT_BYTES = 1 << 30  # from here on its clear pointer overflows (defects.json: flashinfer-clear-overflow)
ONE_SHOT_BYTES: Mapping[int, int] = MappingProxyType({2: 256 << 20, 4: 32 << 20, 8: 21 << 20, 16: 21 << 20})
"""Largest ranks x message for one-shot: FlashInfer's own table, tuned on B200; for 16, which it lacks, that of 8."""

_CLUSTER, _BLOCK, _VECTOR_BYTES = 8, 1024, 16
_MODULES = {"trtllm": "trtllm_comm", "mnnvl": "trtllm_mnnvl_comm"}


def probe(request: Request, key: GroupKey) -> Verdict:
    """Whether this process could serve the group: sizes, GPU, an installed version that is neither refused nor other.

    Local. Imports FlashInfer, which takes seconds the first time, only after everything cheaper is fine.
    """
    problem = (
        find_limit(request, key.size) or find_gpu_problem() or find_version_problem() or find_build_problem("trtllm")
    )
    return Verdict(not problem, problem or f"{key.size} GPUs, FlashInfer's trtllm kernels")


def room(request: Request, key: GroupKey) -> Room:
    """What a workspace takes of this rank's GPU. Local."""
    return Room(gpu=sum(_buffer_bytes(request, key.size)))


def bind(channel: Channel, request: Request) -> FlashInferWorkspace:
    """Load the kernels, try the memory, make the workspace together, and prove it on first calls.

    Collective: every member of the channel's group; never while a stream captures.
    Raises: ResourceError, alike on every member and with nothing left behind, if a member shares its GPU, sits on
        another host, cannot load or allocate, or computes with another rounding; errors of the channel.
    """
    return bind_fusion(channel, request, backend=NAME, fusion="trtllm")


def find_limit(request: Request, size: int) -> str:
    """Why FlashInfer's kernels do not serve this request, or ''. Pure."""
    row_bytes = request.hidden * request.dtype.itemsize
    if size not in SIZES:
        return f"{size} ranks; FlashInfer's trtllm kernels serve {', '.join(map(str, SIZES))}"
    if request.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"{request.dtype}; FlashInfer serves bfloat16, float16 and float32"
    if row_bytes % _VECTOR_BYTES:
        return f"rows of {row_bytes} bytes; FlashInfer serves multiples of {_VECTOR_BYTES}"
    threads = row_bytes // _VECTOR_BYTES
    if threads // _cluster(threads) > _BLOCK:
        return (
            f"hidden {request.hidden}: {threads} vectors of {_VECTOR_BYTES} bytes a row do not divide into "
            f"{_CLUSTER} blocks of at most {_BLOCK}"
        )
    lamport = size * request.max_tokens * row_bytes
    if lamport >= MAX_LAMPORT_BYTES:
        most = (MAX_LAMPORT_BYTES - 1) // (size * row_bytes)
        return (
            f"{request.max_tokens} tokens make buffers of {lamport} bytes, and from {MAX_LAMPORT_BYTES} on its kernels "
            f"clear the wrong memory; prepare at most {most} tokens"
        )
    if request.rounding is Rounding.ONCE and request.dtype.itemsize < 4 and Op.ALL_REDUCE_ADD_RMS_NORM in request.ops:
        return "FlashInfer rounds the sum before it adds the residual; prepare with rounding='twice'"
    return ""


def find_gpu_problem() -> str:
    """Why this process's GPU does not serve, or ''. Local."""
    if not torch.cuda.is_available():
        return "torch finds no usable GPU"
    major, minor = torch.cuda.get_device_capability()
    if major not in (9, 10):
        return f"compute capability {major}.{minor}; FlashInfer's kernels serve Hopper and Blackwell (9.x, 10.x)"
    return ""


def find_version_problem() -> str:
    """Why the installed FlashInfer is not used, or ''. Local; imports it."""
    try:
        version = importlib.metadata.version(FLASHINFER)
    except importlib.metadata.PackageNotFoundError:
        return "FlashInfer is not installed; pip install 'fusion-workbench[gpu]'"
    refusal = find_refusal(FLASHINFER, version)
    if refusal:
        return refusal
    try:
        comm = importlib.import_module("flashinfer.comm")
    except Exception as e:  # whatever its import runs into: missing packages, drivers, files
        return f"FlashInfer {version} cannot be imported: {type(e).__name__}: {e}"
    if importlib.import_module("flashinfer.utils").is_confidential_compute():
        return "confidential computing: FlashInfer takes torch's symmetric memory there, which this path does not"
    return find_drift(comm, version)


def find_drift(comm: Any, version: str) -> str:
    """Which parameter that we pass the installed interface lacks, or ''. Local."""
    for function, ours in PARAMETERS.items():
        theirs = inspect.signature(getattr(comm, function)).parameters
        missing = [name for name in ours if name not in theirs]
        if missing:
            return f"FlashInfer {version}: {function} takes no {', '.join(missing)}; use 0.7.2.post1"
    return ""


def find_build_problem(fusion: str) -> str:
    """Why the kernels of a fusion cannot be loaded at once, or ''. Local.

    FlashInfer compiles at first use, for minutes; members that wait for one another would miss their deadline.
    """
    function = f"gen_{_MODULES[fusion]}_module"
    try:
        spec = getattr(importlib.import_module("flashinfer.jit.comm"), function)()
    except RuntimeError as e:
        return f"FlashInfer has no kernels for this GPU: {e}"
    if spec.is_aot or spec.is_compiled:
        return ""
    return (
        f"FlashInfer has not compiled its kernels here, which takes minutes; once, on each host: python -c "
        f"'from flashinfer.jit.comm import {function} as g; g().build_and_load()'"
    )


def choose_one_shot(tokens: int, request: Request, size: int) -> bool:
    """One-shot or two-shot, from what every member knows. Two-shot needs more tokens than ranks. Pure."""
    return tokens <= size or size * tokens * request.hidden * request.dtype.itemsize <= ONE_SHOT_BYTES[size]


def bind_fusion(channel: Channel, request: Request, *, backend: str, fusion: str) -> FlashInferWorkspace:
    """As bind, for one of FlashInfer's fusions by name."""
    require_own_gpus(channel)
    vote(channel, "loading FlashInfer's kernels", lambda: _as_resource(lambda: _load(fusion)))
    vote(channel, "trying memory for FlashInfer", lambda: _as_resource(lambda: _try_memory(request, channel.key.size)))
    native = create_together(
        channel, "FlashInfer's workspace", lambda comm: _create(channel, request, comm, fusion=fusion)
    )
    workspace = FlashInferWorkspace(channel, request, native, backend=backend, fusion=fusion)
    try:
        vote(channel, "a first call of FlashInfer", lambda: _as_resource(lambda: workspace.prove(channel)))
    except BaseException:
        workspace.close()
        raise
    return workspace


class FlashInferWorkspace:
    """One group's workspace. Calls run on the current stream, one stream at a time, and are safe inside a capture."""

    def __init__(self, channel: Channel, request: Request, native: Any, *, backend: str, fusion: str) -> None:
        self.backend = backend
        self.request = request
        self.size_bytes = sum(_buffer_bytes(request, channel.key.size))
        self._size, self._fusion = channel.key.size, fusion
        self._native = native
        self._comm = importlib.import_module("flashinfer.comm")
        self._limits = limits_of(channel, request, "cuda")

    @property
    def broken(self) -> str:
        """As the Workspace protocol says; these kernels report nothing, so only close shows here."""
        return "" if self._native is not None else f"{self._limits.group}: this workspace is closed; prepare a new one"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """As the Workspace protocol says. Capture: safe."""
        tokens = check_all_reduce(self._limits, x)
        return self._reduce(x, choose_one_shot(tokens, self.request, self._size))

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float, weight_bias: float
    ) -> FusedOutput:
        """As the Workspace protocol says. Capture: safe."""
        tokens = check_fused(self._limits, x, residual, weight, eps, weight_bias)
        one_shot = choose_one_shot(tokens, self.request, self._size)
        return self._fuse(x, residual, weight, eps, weight_bias, one_shot)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Ordinary device memory: these kernels copy or push, so they read any."""
        check_empty(self._limits, shape, dtype)
        return torch.empty(shape, dtype=dtype, device="cuda")

    def close(self) -> None:
        """Give its memory back, the handles that FlashInfer's own destroy() forgets too. Local; twice is fine."""
        native, self._native = self._native, None
        if native is None:
            return
        torch.cuda.synchronize()
        if self._fusion != "trtllm":
            native.destroy()
            return
        control = native.metadata["control_flag_ptr"]
        importlib.import_module("flashinfer.comm.trtllm_ar").trtllm_destroy_ipc_workspace_for_all_reduce_fusion(
            native.ipc_handles
        )
        native.destroy()
        native._internal_workspace = None
        importlib.import_module("flashinfer.comm.cuda_ipc").cudart.cudaFree(ctypes.c_void_p(control))

    def prove(self, channel: Channel) -> None:
        """Capacity as the workspace sees it, no multicast, and first calls. Collective; to be run inside a vote.

        Raises: ResourceError.
        """
        request, most = self.request, max(self.request.max_tokens, 1)
        if not self._native.is_buffer_size_sufficient(self._size, most, request.hidden, request.dtype):
            raise ResourceError(f"FlashInfer made a workspace that does not hold the {most} tokens it was asked for")
        handles = getattr(self._native, "mem_handles", ())
        if self._fusion == "trtllm" and any(int(getattr(h, "mc_ptr", 0) or 0) for h in handles):
            raise ResourceError("FlashInfer's trtllm workspace has a multicast address, which was not asked for")
        for tokens, one_shot in ((1, True), (self._size + 1, False)):
            if tokens <= request.max_tokens:
                prove_calls(
                    channel,
                    request,
                    tokens=tokens,
                    reduce=lambda x, one_shot=one_shot: self._reduce(x, one_shot),  # type: ignore[misc] # bound early
                    fuse=lambda x, r, w, one_shot=one_shot: self._fuse(x, r, w, EPS, 0.0, one_shot),  # type: ignore[misc]
                )

    def _reduce(self, x: torch.Tensor, one_shot: bool) -> torch.Tensor:
        total = torch.empty_like(x)
        self._launch(x, one_shot, pattern=self._comm.AllReduceFusionPattern.kAllReduce, output=total)
        return total

    def _fuse(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        weight_bias: float,
        one_shot: bool,
    ) -> FusedOutput:
        norm, total = torch.empty_like(x), torch.empty_like(x)
        self._launch(
            x,
            one_shot,
            pattern=self._comm.AllReduceFusionPattern.kARResidualRMSNorm,
            residual_in=_aligned(residual),
            residual_out=total,
            norm_out=norm,
            rms_gamma=_aligned(weight),
            rms_eps=eps,
            weight_bias=weight_bias,
        )
        return FusedOutput(norm, total)

    def _launch(self, x: torch.Tensor, one_shot: bool, **arguments: Any) -> None:
        if self._native is None:
            raise ClosedError(self.broken)
        if x.shape[0] == 0:
            return
        self._comm.allreduce_fusion(
            input=_aligned(x),
            workspace=self._native,
            launch_with_pdl=True,
            use_oneshot=one_shot if self._fusion == "trtllm" else None,
            fp32_acc=self.request.dtype.itemsize < 4,
            **arguments,
        )


def _cluster(threads: int) -> int:
    """Blocks a row is cut into: the largest power of two up to 8 that divides its vectors, as its launcher does."""
    return max(c for c in (1, 2, 4, _CLUSTER) if threads % c == 0)


def _buffer_bytes(request: Request, size: int) -> tuple[int, int, int]:
    """FlashInfer's three buffers a rank: data, flags, three Lamport buffers."""
    message = size * max(request.max_tokens, 1) * request.hidden * request.dtype.itemsize
    return message, size * 256 * 4, 3 * message


def _load(fusion: str) -> None:
    name = _MODULES[fusion]
    module = importlib.import_module(f"flashinfer.comm.{name.replace('_comm', '_ar')}")
    getattr(module, f"get_{name}_module")()


def _try_memory(request: Request, size: int) -> None:
    """Create and release memory as FlashInfer will: free bytes alone do not promise it (SGLang pull request 24172)."""
    driver = importlib.import_module("cuda.bindings.driver")
    device = torch.cuda.current_device()
    fabric = importlib.import_module("flashinfer.comm.mnnvl").is_mnnvl_fabric_supported(device)
    kinds = driver.CUmemAllocationHandleType
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = device
    wanted.requestedHandleTypes = (
        kinds.CU_MEM_HANDLE_TYPE_FABRIC if fabric else kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    )
    wanted.allocFlags.gpuDirectRDMACapable = 1
    granularity = 2 << 20
    handles = []
    try:
        for size_bytes in _buffer_bytes(request, size):
            rounded = -(-(size_bytes + 2048) // granularity) * granularity
            status, handle = driver.cuMemCreate(rounded, wanted, 0)
            if int(status):
                raise ResourceError(f"{rounded} bytes that peers can map: {status.name}")
            handles.append(handle)
    finally:
        for handle in handles:
            driver.cuMemRelease(handle)


def _create(channel: Channel, request: Request, comm: ChannelComm, *, fusion: str) -> Any:
    create = importlib.import_module("flashinfer.comm").create_allreduce_fusion_workspace
    named = {"group": channel.torch_group} if "group" in inspect.signature(create).parameters else {}
    return create(
        backend=fusion,
        world_size=channel.key.size,
        rank=channel.key.group_rank(channel.world_rank),
        max_token_num=max(request.max_tokens, 1),
        hidden_dim=request.hidden,
        dtype=request.dtype,
        comm_backend=comm,
        **named,
    )


def _as_resource(attempt: Callable[[], None]) -> None:
    """Run it; what FlashInfer or CUDA raises becomes a ResourceError that a vote can carry."""
    try:
        attempt()
    except WorkbenchError:
        raise
    except Exception as e:
        raise ResourceError(f"{type(e).__name__}: {e}") from e


def _aligned(t: torch.Tensor) -> torch.Tensor:
    return t if t.data_ptr() % _VECTOR_BYTES == 0 else t.clone()
