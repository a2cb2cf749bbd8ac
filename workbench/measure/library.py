"""The library's own ways: torch's all-reduce (gloo, NCCL, symmetric memory) followed by residual-add and RMSNorm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from workbench.measure.case import EPS, Case, Gives, Inputs, Work
from workbench.trace import Role

Norm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(summed x, residual, weight) -> (norm, sum + residual); on GPUs the residual is updated in place, as engines do."""


class LibraryWays:
    """All-reduce by torch.distributed, then add and norm; on GPUs also torch's symmetric memory, and the limits.

    Collective to make on GPUs: a symmetric buffer of max_tokens is exchanged over the default group.
    """

    def __init__(self, work: Work, group: dist.ProcessGroup, *, max_tokens: int) -> None:
        self._work, self._group = work, group
        self._symmetric = SymmetricBuffers(work, max_tokens) if work.device == "cuda" else None

    def cases(self, inputs: Inputs) -> Iterator[Case]:
        """The ways at the number of tokens of the inputs."""
        library = "NCCL" if self._work.device == "cuda" else "gloo"
        norm = _norm_of(self._work.device, inputs.x)
        all_reduce = self._all_reduce
        yield self._composed(f"{library.lower()}+norm", f"{library} all-reduce + norm", all_reduce, norm, inputs)
        yield self._norm_alone(norm, inputs)
        if self._symmetric is not None:
            yield from self._symmetric.cases(self._composed, norm, inputs)

    def _all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=self._group)
        return x

    def _composed(
        self,
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

    def _norm_alone(self, norm: Norm, inputs: Inputs) -> Case:
        x, residual = torch.empty_like(inputs.x), torch.empty_like(inputs.x)
        return Case(
            name="norm",
            label="add + norm alone",
            role=Role.PART,
            gives=Gives.NORM,
            x=x,
            residual=residual,
            call=lambda: norm(x, residual, inputs.weight),
        )


class SymmetricBuffers:
    """torch's symmetric memory over the default group, without multicast: its two all-reduces, and bare peer writes."""

    def __init__(self, work: Work, max_tokens: int) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self._work = work
        self._name = dist.group.WORLD.group_name  # type: ignore[union-attr] # initialised by now
        size = max_tokens * work.hidden * work.dtype.itemsize
        self._own, self._written = (
            symmetric_memory.empty(size, dtype=torch.uint8, device=torch.device("cuda")) for _ in range(2)
        )
        self._handles = [symmetric_memory.rendezvous(t, self._name) for t in (self._own, self._written)]
        assert not any(int(h.multicast_ptr or 0) for h in self._handles), "multicast must stay off"
        self._next = self._handles[1].get_buffer((work.rank + 1) % work.ranks, (size,), torch.uint8)

    def cases(self, composed: Callable[..., Case], norm: Norm, inputs: Inputs) -> Iterator[Case]:
        """Both all-reduces with the norm, and the two ways to write to the next rank."""
        from workbench.measure.triton_kernels import copy_by_threads

        x = self._rows(self._own, inputs.x)
        ops = torch.ops.symm_mem

        def one_shot(x: torch.Tensor) -> Any:
            return ops.one_shot_all_reduce(x, "sum", self._name)

        def two_shot(x: torch.Tensor) -> Any:
            return ops.two_shot_all_reduce_(x, "sum", self._name)

        yield composed("symm1+norm", "symmetric memory, one-shot + norm", one_shot, norm, inputs, x)
        yield composed("symm2+norm", "symmetric memory, two-shot + norm", two_shot, norm, inputs, x)
        target = self._rows(self._next, inputs.x)
        for name, label, copy in (
            ("write", "peer write, driver's copy", lambda source: target.copy_(source)),
            ("write by threads", "peer write, by multiprocessors", lambda source: copy_by_threads(source, target)),
        ):
            yield _limit(name, label, copy, inputs)

    def _rows(self, buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
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
