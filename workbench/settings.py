"""Settings: every environment variable the package reads, read once at the door and compared across ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from workbench.errors import ArgumentError

VARIABLES = {
    "WORKBENCH_DEVICE": "cpu or cuda; default: cuda where torch finds a GPU for every rank, else cpu",
    "WORKBENCH_FUSION": "0 switches the fused kernels off; every call then reduces, adds and normalises in turn",
    "WORKBENCH_CUSTOM_ALL_REDUCE": "0 switches our own kernels off, fused or not; groups take the library's path",
    "WORKBENCH_MULTICAST": "1 allows multicast (NVLS) where every GPU of a group has it; default: off",
    "WORKBENCH_SHARE_GPUS": "1 lets several ranks use one GPU: right results, times that mean nothing; default: off",
    "WORKBENCH_CHECK": "1 compares every call's arguments across its group before it runs: slow, for finding mistakes",
    "WORKBENCH_TIMEOUT_S": "seconds that any wait on another rank may take; default 60",
    "WORKBENCH_TEST": "1 prints a cell's output once, sorted by rank and without colour, as under nbval",
    "WORKBENCH_TRACE_DIR": "directory that receives one trace file a rank; default: no trace",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the environment asks for. `device` and `trace_dir` are None where it says nothing."""

    device: str | None = None
    fusion: bool = True
    custom_all_reduce: bool = True
    multicast: bool = False
    share_gpus: bool = False
    check: bool = False
    test: bool = False
    timeout_s: float = 60.0
    trace_dir: str | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Settings from `environ` (default: os.environ). Raises ArgumentError for a value that is not allowed."""
        env = os.environ if environ is None else environ
        device = env.get("WORKBENCH_DEVICE") or None
        if device not in (None, "cpu", "cuda"):
            raise ArgumentError(f"WORKBENCH_DEVICE={device!r}; allowed: cpu, cuda, or unset")
        return cls(
            device=device,
            fusion=_switch(env, "WORKBENCH_FUSION", "1"),
            custom_all_reduce=_switch(env, "WORKBENCH_CUSTOM_ALL_REDUCE", "1"),
            multicast=_switch(env, "WORKBENCH_MULTICAST", "0"),
            share_gpus=_switch(env, "WORKBENCH_SHARE_GPUS", "0"),
            check=_switch(env, "WORKBENCH_CHECK", "0"),
            test=_switch(env, "WORKBENCH_TEST", "0"),
            timeout_s=_seconds(env, "WORKBENCH_TIMEOUT_S", 60.0),
            trace_dir=env.get("WORKBENCH_TRACE_DIR") or None,
        )


def check_timeout(timeout_s: object, name: str = "timeout_s") -> float:
    """`timeout_s` as a float, or ArgumentError unless it is a number of seconds in (0, 86400]."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 < timeout_s <= 86400:
        raise ArgumentError(f"{name}={timeout_s!r}; allowed: seconds above 0 and up to 86400 (a day)")
    return float(timeout_s)


def _switch(env: Mapping[str, str], name: str, default: str) -> bool:
    value = env.get(name, default)
    if value not in ("0", "1"):
        raise ArgumentError(f"{name}={value!r}; allowed: 0 or 1")
    return value == "1"


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    value = env.get(name)
    if not value:
        return default
    try:
        return check_timeout(float(value), name)
    except ValueError:  # ArgumentError is one too; say what was written, not what became of it
        raise ArgumentError(f"{name}={value!r}; allowed: seconds above 0 and up to 86400 (a day)") from None
