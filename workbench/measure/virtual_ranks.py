"""Virtual ranks: all members of a group as one launch on one GPU, through the kernels that real ranks run.

Each virtual rank has slots, control words and inputs of its own, so the protocol of sixteen ranks can be checked where
there is one GPU. Times of it say nothing of sixteen GPUs: the ranks share one chip and no link is crossed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

import torch

from workbench.backends import custom_abi as abi
from workbench.backends.custom import DTYPE_CODES
from workbench.backends.custom_build import build_cuda
from workbench.documents import parse_document
from workbench.errors import ResourceError
from workbench.ops import Rounding, reference_all_reduce_add_rms_norm

EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualRun:
    """What was checked: residuals of every virtual rank, bit for bit. `source` is "run here" or the record's name."""

    ranks: tuple[int, ...]
    checks: int
    wrong: int
    device: str
    source: str

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return f"virtual: {ranks} ranks on one {self.device}: {self.checks} checks, {self.wrong} wrong ({self.source})"


def check_virtual_ranks(
    *,
    ranks: int = 16,
    hidden: int = 7168,
    tokens: Sequence[int] = (1, 8, 3, 32),
    dtype: torch.dtype = torch.bfloat16,
    timeout_s: float = 5.0,
) -> VirtualRun:
    """Run the fused kernel with `ranks` virtual ranks on this process's GPU and compare each rank's residual.

    Shapes: [count, hidden] of dtype for each count in tokens, on random data alike for every call of this function.
    Local.   Raises: ResourceError without a GPU or kernels, or if a virtual rank waited longer than timeout_s.
    """
    if not torch.cuda.is_available():
        raise ResourceError("virtual ranks need a GPU, and torch finds none; recorded_virtual_run() has an earlier run")
    device = torch.cuda.current_device()
    major, minor = torch.cuda.get_device_capability()
    kernels = abi.Kernels(build_cuda(f"{major}{minor}a"))
    rows = abi.plane_rows(max(tokens), hidden, dtype.itemsize, ranks)
    sizes = {"ranks": ranks, "rows": rows, "hidden": hidden, "dtype": DTYPE_CODES[dtype]}
    memory: list[abi.OwnMemory] = []
    try:
        memory += (abi.OwnMemory(kernels, device, **sizes) for _ in range(ranks))
        wrong = sum(
            _count_wrong(kernels, memory, count, rows=rows, hidden=hidden, dtype=dtype, timeout_s=timeout_s)
            for count in tokens
        )
    except abi.KernelError as e:
        raise ResourceError(f"{ranks} virtual ranks: {e}") from e
    finally:
        torch.cuda.synchronize()
        for own in memory:
            own.free()
    return VirtualRun(
        ranks=(ranks,),
        checks=ranks * len(tokens),
        wrong=wrong,
        device=torch.cuda.get_device_name(),
        source="run here",
    )


def recorded_virtual_run() -> VirtualRun:
    """The record of an earlier run, for machines without a GPU. Local."""
    name = "virtual_ranks.json"
    doc = parse_document((files("workbench.measure") / name).read_text(encoding="utf-8"), name)
    doc.take_whole("schema", 1, 1)
    run = VirtualRun(
        ranks=tuple(int(r) for r in doc.take_list("ranks")),
        checks=doc.take_whole("checks", 1, 1 << 30),
        wrong=doc.take_whole("wrong", 0, 1 << 30),
        device=doc.take_text("device"),
        source=doc.take_text("source"),
    )
    doc.end()
    return run


def _count_wrong(
    kernels: abi.Kernels,
    memory: Sequence[abi.OwnMemory],
    tokens: int,
    *,
    rows: int,
    hidden: int,
    dtype: torch.dtype,
    timeout_s: float,
) -> int:
    """Ranks whose residual differs from the reference in one call of `tokens` rows."""
    ranks = len(memory)
    parts = [_normal((tokens, hidden), seed, dtype) for seed in range(ranks)]
    residual, weight = _normal((tokens, hidden), ranks, dtype), _normal((hidden,), ranks + 1, dtype)
    want = reference_all_reduce_add_rms_norm(parts, residual, weight, eps=EPS, rounding=Rounding.ONCE)
    on_gpu = [part.cuda() for part in parts]
    shared, scale = residual.cuda(), weight.cuda()
    outs = [(torch.empty_like(shared), torch.empty_like(shared)) for _ in parts]
    choice = abi.choose(tokens, hidden, dtype.itemsize, ranks)
    call = abi.Call(
        op=abi.ADD_NORM,
        dtype=DTYPE_CODES[dtype],
        ranks=ranks,
        virtual_ranks=ranks,
        tokens=tokens,
        hidden=hidden,
        plane_rows=rows,
        algorithm=choice.algorithm,
        cluster=choice.cluster,
        trigger=choice.trigger,
        pdl=1,
        eps=EPS,
        timeout_ns=int(timeout_s * 1e9),
        weight=scale.data_ptr(),
    )
    for i, (own, x, (norm, total)) in enumerate(zip(memory, on_gpu, outs, strict=True)):
        call.slots[i] = own.slots
        own.fill(call.rank[i])
        rank = call.rank[i]
        rank.x, rank.residual, rank.norm, rank.sum = (t.data_ptr() for t in (x, shared, norm, total))
    most = kernels.resident_lanes(call)
    call.max_lanes = min(choice.max_lanes or most, most)
    kernels.push(call, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    late = [(own.report.rank, own.report.peer) for own in memory if own.report.valid]
    if late:
        waiter, peer = late[0]
        raise ResourceError(f"virtual: group rank {waiter} waited longer than {timeout_s:g} s for group rank {peer}")
    return sum(not torch.equal(total.cpu(), want.residual) for _, total in outs)


def _normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
