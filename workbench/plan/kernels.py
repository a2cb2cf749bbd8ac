"""Kernels: which of the algorithms that tables name exist as kernels. Tables may run ahead of them."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.plan.tables import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """algorithms: those with a kernel.   across_hosts: whether they reach memory of other hosts of an NVLink clique."""

    algorithms: frozenset[Algorithm]
    across_hosts: bool


BUILT_KERNELS = Kernels(algorithms=frozenset({Algorithm.PUSH}), across_hosts=False)
"""What kernels_ext/cuda holds: memory is shared through CUDA IPC, which ends at the host."""

EVERY_KERNEL = Kernels(algorithms=frozenset(Algorithm), across_hosts=True)
"""As if all had been written: what tables and links alone decide."""
