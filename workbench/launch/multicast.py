"""Multicast is off for the jobs we start, in the libraries too, unless WORKBENCH_MULTICAST=1."""

from __future__ import annotations

from collections.abc import Mapping

_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def multicast_switches(environ: Mapping[str, str]) -> dict[str, str]:
    """What a job's environment needs so that NCCL, torch and NVSHMEM make no multicast object. Pure.

    A variable that is set already keeps its value: whoever set it knows.
    """
    if environ.get("WORKBENCH_MULTICAST") == "1":
        return {}
    return {name: environ.get(name, value) for name, value in _OFF.items()}
