"""The library's own ways: torch's all-reduce (gloo, NCCL, symmetric memory) followed by residual-add and RMSNorm."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from workbench.errors import ResourceError
from workbench.measure.case import EPS, Case, Gives, Inputs, Work
from workbench.trace import Role

NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
"""The environment of ranks whose times are compared: no system makes NVLink multicast objects."""

LIBRARY_WAYS = ("gloo+norm", "nccl+norm", "norm")
SYMMETRIC = "symmetric memory"
SYMMETRIC_WAYS = ("symm1+norm", "symm2+norm", "write", "write by threads")
"""The names of the cases here."""

Norm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(summed x, residual, weight) -> (norm, sum + residual); on GPUs the residual is updated in place, as engines do."""


class LibraryWays:
    """All-reduce by torch.distributed over one group, then add and norm; and the norm alone. Local to make."""

    def __init__(self, work: Work, group: dist.ProcessGroup) -> None:
        self._work, self._group = work, group

    def cases(self, inputs: Inputs) -> Iterator[Case]:
        """The ways at the number of tokens of the inputs."""
        library = "NCCL" if self._work.device == "cuda" else "gloo"
        norm = _norm_of(self._work.device, inputs.x)

        def all_reduce(x: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(x, group=self._group)
            return x

        yield _composed(f"{library.lower()}+norm", f"{library} all-reduce + norm", all_reduce, norm, inputs)
        alone = _composed("norm", "add + norm alone", lambda x: x, norm, inputs)
        yield replace(alone, role=Role.PART, gives=Gives.NORM)


class SymmetricWays:
    """torch's symmetric memory over the default group, without multicast: its two all-reduces, and bare peer writes.

    Collective to make: two buffers of max_tokens are exchanged. Raises ResourceError unless NO_MULTICAST is set.
    """

    def __init__(self, work: Work, *, max_tokens: int) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        if any(os.environ.get(name) != value for name, value in NO_MULTICAST.items()):
            raise ResourceError(f"start the ranks with {NO_MULTICAST}, or torch and NCCL make multicast objects")
        assert dist.group.WORLD is not None
        self._name = dist.group.WORLD.group_name
        size = max_tokens * work.hidden * work.dtype.itemsize
        device = torch.device("cuda", torch.cuda.current_device())
        self._own, written = (symmetric_memory.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
        self._handles = [symmetric_memory.rendezvous(t, self._name) for t in (self._own, written)]
        assert not any(int(h.multicast_ptr or 0) for h in self._handles), "multicast must stay off"
        self._next = self._handles[1].get_buffer((work.rank + 1) % work.ranks, (size,), torch.uint8)
        self._written = written  # peers write into it as long as this rank lives

    def cases(self, inputs: Inputs) -> Iterator[Case]:
        """Both all-reduces with the norm, and the two ways to write to the next rank."""
        from workbench.measure.triton_kernels import copy_by_threads

        x, norm, ops = _rows(self._own, inputs.x), _norm_of("cuda", inputs.x), torch.ops.symm_mem

        def one_shot(x: torch.Tensor) -> Any:
            return ops.one_shot_all_reduce(x, "sum", self._name)

        def two_shot(x: torch.Tensor) -> Any:
            return ops.two_shot_all_reduce_(x, "sum", self._name)

        yield _composed("symm1+norm", "symmetric memory, one-shot + norm", one_shot, norm, inputs, x)
        yield _composed("symm2+norm", "symmetric memory, two-shot + norm", two_shot, norm, inputs, x)
        target = _rows(self._next, inputs.x)
        yield _limit("write", "peer write, driver's copy", target.copy_, inputs)
        by_threads = partial(copy_by_threads, target=target)
        yield _limit("write by threads", "peer write, by multiprocessors", by_threads, inputs)


def _composed(
    name: str,
    label: str,
    reduce: Callable[[torch.Tensor], torch.Tensor],
    norm: Norm,
    inputs: Inputs,
    x: torch.Tensor | None = None,
) -> Case:
    own = torch.empty_like(inputs.x) if x is None else x
    residual = torch.empty_like(inputs.x)
    return Case(
        name=name,
        label=label,
        role=Role.PEER,
        gives=Gives.FUSED,
        x=own,
        residual=residual,
        call=lambda: norm(reduce(own), residual, inputs.weight),
    )


def _rows(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return buffer[: like.numel() * like.itemsize].view(like.dtype).view(like.shape)


def _limit(name: str, label: str, copy: Callable[[torch.Tensor], object], inputs: Inputs) -> Case:
    source = torch.empty_like(inputs.x)

    def call() -> tuple[None, None]:
        copy(source)
        return None, None

    return Case(
        name=name,
        label=label,
        role=Role.LIMIT,
        gives=Gives.NOTHING,
        x=source,
        residual=torch.empty_like(inputs.x),
        call=call,
    )


def _norm_of(device: str, like: torch.Tensor) -> Norm:
    """Add and norm in torch on the CPU, in one Triton kernel on a GPU."""
    if device == "cpu":

        def on_cpu(
            total: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            added = total + residual
            return torch.nn.functional.rms_norm(added, weight.shape, weight, EPS), added

        return on_cpu
    from workbench.measure.triton_kernels import add_rms_norm_into

    norm = torch.empty_like(like)

    def on_gpu(total: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        add_rms_norm_into(norm, residual, total, residual, weight, EPS)
        return norm, residual

    return on_gpu
