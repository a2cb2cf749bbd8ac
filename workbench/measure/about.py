"""What a time was measured on and with: versions, devices, the class of host; never a name of a host or a user."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil
import torch

from workbench.measure.kit import kit_versions
from workbench.measure.spec import FusedSpec
from workbench.version import VERSION


def describe_run(spec: FusedSpec) -> dict[str, Any]:
    """The `about` of a comparison. Local; asks git and nvidia-smi where they are."""
    cuda = spec.device == "cuda"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "workbench": VERSION,
        "commit": _ask("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD") or "unknown",
        "arch": "sm{}{}".format(*torch.cuda.get_device_capability()) if cuda else "cpu",
        "command": spec.command,
        "method": spec.method,
        "calls": spec.calls,
        "rounds": spec.rounds,
        "delay_us": spec.delay_us,
        "host": describe_host(),
        "cores": count_cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "nccl": _nccl_version() if cuda else None,
        "driver": _ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
        if cuda
        else None,
        "peers": kit_versions(Path(spec.peers)) if spec.peers else [],
    }


def describe_device(device: str) -> str:
    """'NVIDIA H200', or the model of the CPU."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"CPU {models[0]}"[:100] if models else f"CPU {platform.machine()}"


def count_cores() -> int:
    """The logical CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def describe_host() -> str:
    """The class of host: architecture, logical CPUs, memory."""
    return f"{platform.machine()}, {os.cpu_count()} CPUs, {round(psutil.virtual_memory().total / 2**30)} GiB"


def _nccl_version() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call] # torch has no types here


def _ask(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
