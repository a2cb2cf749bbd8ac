"""Backend `flashinfer_mnnvl`: FlashInfer's `mnnvl` kernels, which need NVLink multicast.

Within one host, only by name and only with WORKBENCH_MULTICAST=1; never a default. This project has never run it: none
of its machines allows multicast. Set-up and first calls are those of backend flashinfer, so another rounding or a wrong
sum is refused at bind. FlashInfer's `auto`, which takes these kernels wherever a device reports multicast, is not
offered.
"""

from __future__ import annotations

import torch

from workbench.backends.base import Channel, Request, Verdict
from workbench.backends.flashinfer import (
    SIZES,
    FlashInferWorkspace,
    bind_fusion,
    find_build_problem,
    find_gpu_problem,
    find_version_problem,
    room,
)
from workbench.ranks import GroupKey

__all__ = ["NAME", "bind", "probe", "room"]

NAME = "flashinfer_mnnvl"


def probe(request: Request, key: GroupKey) -> Verdict:
    """Whether this process could serve the group. Local. The setting is asked before (plan.find_switch)."""
    row_bytes = request.hidden * request.dtype.itemsize
    if key.size not in SIZES:
        return Verdict(False, f"{key.size} ranks; this path serves {', '.join(map(str, SIZES))}")
    if request.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return Verdict(False, f"{request.dtype}; FlashInfer serves bfloat16, float16 and float32")
    if row_bytes % 16:
        return Verdict(False, f"rows of {row_bytes} bytes; FlashInfer serves multiples of 16")
    problem = find_gpu_problem() or find_version_problem() or find_build_problem("mnnvl")
    return Verdict(not problem, problem or f"{key.size} GPUs, FlashInfer's mnnvl kernels (never run by this project)")


def bind(channel: Channel, request: Request) -> FlashInferWorkspace:
    """As flashinfer.bind; FlashInfer makes a multicast object for it. Collective; raises as there."""
    return bind_fusion(channel, request, backend=NAME, fusion="mnnvl")
