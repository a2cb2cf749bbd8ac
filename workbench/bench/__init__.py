"""`workbench measure` and `workbench tune`: jobs that time our way beside others, and what comes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.bench.commands import NumberRange, device_option, measure, tune
from workbench.bench.files import check_place, make_directory, write_whole

if TYPE_CHECKING:
    from workbench.bench.gpus import gpu_comparison

__all__ = [
    "NumberRange",
    "check_place",
    "device_option",
    "gpu_comparison",
    "make_directory",
    "measure",
    "tune",
    "write_whole",
]


def __getattr__(name: str) -> Any:
    if name == "gpu_comparison":  # needs torch, which the command line does not load for its help
        from workbench.bench.gpus import gpu_comparison

        return gpu_comparison
    raise AttributeError(name)
