"""What this rank's device, host and links really offer. Every probe has a deadline, and none is needed: a rank without
a GPU or a driver gives the facts it has, and says in `notes` what could not be read.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from workbench.backends.base import Channel
from workbench.backends.places import host_id
from workbench.backends.vote import vote
from workbench.fabric import NO_CLIQUE, Allocator, Clique, Fabric, Facts, Link, Outcome, Trial
from workbench.runtime import cuda_probe
from workbench.settings import Settings

STEP_DEADLINE_S = 15.0


def probe_facts(
    world_rank: int, *, device: str, settings: Settings | None = None, step_deadline_s: float = STEP_DEADLINE_S
) -> Facts:
    """The facts of this rank. `device` is "cpu" or "cuda"; for "cuda" the current CUDA device is probed.

    What may hang or crash runs in a process of its own, which ends with this one and is killed past the deadline. It
    takes seconds and, for that time, a context on every visible device; a process tries a device once. The allocator,
    which a setting can change, is looked at each time.
    Units: step_deadline_s seconds for each thing that is tried.   Collective: local.   Capture: forbidden.
    """
    settings = Settings.read() if settings is None else settings
    host = host_id()
    node = socket.gethostname()
    if device != "cuda":
        return Facts(world_rank=world_rank, host=host, node=node)
    if not torch.cuda.is_available():
        return Facts(world_rank=world_rank, host=host, node=node, notes=("torch finds no usable GPU",))
    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    uuid = f"GPU-{str(properties.uuid).removeprefix('GPU-')}"
    told, others = _try_device(uuid, step_deadline_s)
    allocator, allocator_note = probe_allocator(index, step_deadline_s)
    nvml = told["nvml"].get("value") or {}
    notes = [f"{step}: {told[step]['reason']}" for step in ("devices", "nvml") if told[step]["outcome"] != "works"]
    return Facts(
        world_rank=world_rank,
        host=host,
        node=node,
        device=uuid,
        device_name=properties.name,
        arch=f"sm{properties.major}{properties.minor}",
        num_sms=properties.multi_processor_count,
        links=tuple(
            Link(
                device=other,
                nvlink=bool(nvml.get("nvlink", {}).get(other, False)),
                peer_access=_trial(told[f"peer_access:{other}"]),
                ipc=_trial(told[f"ipc:{other}"]),
            )
            for other in others
        ),
        clique=Clique(**nvml["clique"]) if nvml else NO_CLIQUE,
        allocator=allocator,
        vmm_fd=_trial(told["vmm_fd"]),
        vmm_fabric=_trial(told["vmm_fabric"]),
        multicast_supported=bool((told["devices"].get("value") or {}).get("multicast", False)),
        multicast_forbidden=not settings.multicast,
        may_share=settings.share_gpus,
        notes=(*notes, *([allocator_note] if allocator_note else [])),
    )


@cache
def _try_device(device: str, step_deadline_s: float) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """What the probe's processes say of a device, and the other devices they see. Hardware is asked once a process."""
    told = run_steps(device, ["devices", "nvml"], step_deadline_s)
    seen = (told["devices"].get("value") or {}).get("devices", [])
    others = [d for d in seen if d != device]
    trials = [f"{what}:{other}" for other in others for what in ("peer_access", "ipc")]
    return told | run_steps(device, ["vmm_fd", "vmm_fabric", *trials], step_deadline_s), others


def vote_fabric(channel: Channel, probe: Callable[[], Facts]) -> Fabric:
    """The gathered facts of the channel's group; decisions over them are then alike on every member.

    `probe` gives this rank's facts.
    Collective: every member of the group.   Raises: ResourceError, alike on every member, if a member cannot tell its
    facts; DeadlineError and PeerDeadError from the channel.
    """
    told = vote(channel, "telling facts", lambda: probe().to_json())
    return Fabric(channel.key, tuple(Facts.from_json(f, f"{channel.key} facts[{i}]") for i, f in enumerate(told)))


def run_steps(
    device: str, steps: Sequence[str], step_deadline_s: float, *, program: str | None = None
) -> dict[str, dict[str, Any]]:
    """The answer to each step, as cuda_probe prints it. Local.

    A step that gives no answer in time, or that ends its process, has failed. After a failure a fresh process takes the
    steps that are left.
    """
    answers: dict[str, dict[str, Any]] = {}
    while len(answers) < len(steps):
        left = [step for step in steps if step not in answers]
        found = _ask(program or cuda_probe.__file__, device, left, step_deadline_s)
        answers |= found or {left[0]: _failed("the probe's process ended without an answer")}
    return answers


def probe_allocator(index: int, deadline_s: float) -> tuple[Allocator, str]:
    """What kind of memory torch's caching allocator hands out on a device: the driver is asked about one byte of it."""
    found: list[tuple[Allocator, str]] = []

    def look() -> None:
        with torch.cuda.device(index):
            byte = torch.empty(1, dtype=torch.uint8, device="cuda")
            found.append(_allocation_kind(byte.data_ptr()))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(deadline_s)
    return found[0] if found else (Allocator.NONE, f"allocator: no answer within {deadline_s:g} s")


def _allocation_kind(address: int) -> tuple[Allocator, str]:
    driver = ctypes.CDLL("libcuda.so.1")
    handle = ctypes.c_uint64()
    if driver.cuMemRetainAllocationHandle(ctypes.byref(handle), ctypes.c_void_p(address)):
        return Allocator.PLAIN, ""
    properties = cuda_probe.AllocationProperties()
    failed = driver.cuMemGetAllocationPropertiesFromHandle(ctypes.byref(properties), handle)
    driver.cuMemRelease(handle)
    if not failed and properties.handle_types & cuda_probe.FABRIC:
        return Allocator.VMM_FABRIC, ""
    if not failed and properties.handle_types & cuda_probe.FD:
        return Allocator.VMM_POSIX_FD, ""
    return Allocator.NONE, "allocator: VMM memory that was not made to be exported"


def _ask(program: str, device: str, steps: Sequence[str], step_deadline_s: float) -> dict[str, dict[str, Any]]:
    """Answers of one process, until it has answered all or ends, or a step runs out of time."""
    process = subprocess.Popen(
        [sys.executable, "-P", program, device, *steps],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    answers: dict[str, dict[str, Any]] = {}
    try:
        lines = _Lines(process)
        for step in steps:
            line, status = lines.read(step_deadline_s)
            if line is None:
                if status is None:
                    answers[step] = _failed(f"no answer within {step_deadline_s:g} s")
                elif status != 0:
                    answers[step] = _failed(f"the probe's process was ended by {_name_end(status)}")
                break
            try:
                answers[step] = {**_failed(""), **json.loads(line)}
            except (ValueError, TypeError):
                answers[step] = _failed("an answer that is no JSON")
    finally:
        _end(process)
    return answers


class _Lines:
    """Lines of a process, each with a deadline."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._process = process
        self._pipe = process.stdout.fileno()
        self._rest = b""

    def read(self, deadline_s: float) -> tuple[bytes | None, int | None]:
        """The next line; or (None, None) past the deadline, or (None, status) if the process ended instead."""
        ends = time.monotonic() + deadline_s
        while b"\n" not in self._rest:
            left = ends - time.monotonic()
            if left <= 0 or not select.select([self._pipe], [], [], left)[0]:
                return None, None
            data = os.read(self._pipe, 1 << 16)
            if not data:
                return None, _wait(self._process)
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        return line, None


def _failed(reason: str) -> dict[str, Any]:
    return {"outcome": "fails", "reason": reason, "value": None}


def _name_end(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"status {status}"


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    """Its status; None for one that even the kernel cannot end, which is left behind rather than waited for."""
    try:
        return process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the probe and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.stdout is not None:
        process.stdout.close()
    _wait(process)


def _trial(answer: Mapping[str, Any]) -> Trial:
    return Trial(Outcome(answer["outcome"]), str(answer["reason"])[:300])
