"""The first exchange of a session: who is here, and did all come with the same map, device and settings?"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import psutil
import torch
import torch.distributed as dist

from workbench.backends.places import host_id
from workbench.errors import ArgumentError, CallFailedError, LayoutError, PlanMismatchError, name_error
from workbench.ranks import GroupMap
from workbench.runtime.members import OPENING, Member, gather_over_store, ranks_text
from workbench.settings import Settings


def exchange_hello(
    store: dist.Store,
    group_map: GroupMap,
    *,
    world_rank: int,
    world_size: int,
    device: str,
    settings: Settings,
    problem: Exception | None,
    timeout_s: float,
    now_and_then: Callable[[], None] | None = None,
) -> dict[int, Member]:
    """The members of the world by world rank, after comparing what they came with.

    Collective: every rank, before the first group is made.
    problem: what this rank cannot go on with.
    Raises, alike on every rank: ArgumentError or CallFailedError for a rank's problem, DeadlineError naming absent
    ranks, LayoutError if the map is for another world size,
    PlanMismatchError if maps, devices, settings or deadlines differ, ArgumentError if two ranks share one GPU and may
    not.
    """
    hello: dict[str, Any] = {}
    if problem is None:
        try:
            hello = _introduce(group_map, device=device, settings=settings, timeout_s=timeout_s)
        except Exception as e:  # told: nobody is to wait for this rank
            problem = e
    if isinstance(problem, ArgumentError):
        hello = {"problem": str(problem)}
    elif problem is not None:
        hello = {"failed": name_error(problem)}
    hellos = gather_over_store(
        store,
        "hello",
        world_rank=world_rank,
        world_size=world_size,
        value=hello,
        timeout_s=timeout_s,
        what=OPENING,
        now_and_then=now_and_then,
    )
    for r, h in enumerate(hellos):
        if "problem" in h:
            raise ArgumentError(f"world rank {r} cannot open its Session: {h['problem']}")
        if "failed" in h:
            cause = problem if r == world_rank else None
            raise CallFailedError.arose(group_map.system, OPENING, r, h["failed"]) from cause
    _compare(hellos, "group maps", lambda h: f"{h['map']} ({h['map_text']})", "build the same GroupMap on every rank")
    if group_map.local_numbering:
        raise LayoutError(
            f"kinds {', '.join(group_map.local_numbering)} of this {group_map.system} map count ranks inside one "
            f"engine; "
            f"a Session needs world ranks: build the map without elastic_ep"
        )
    if group_map.world_size != world_size:
        raise LayoutError(
            f"the group map is for {group_map.world_size} ranks, but the job has {world_size}; start "
            f"{group_map.world_size} ranks or build a map for {world_size}"
        )
    _compare(hellos, "devices", lambda h: str(h["device"]), "pass the same device= or set WORKBENCH_DEVICE alike")
    for name in ("fusion", "custom_all_reduce", "multicast", "share_gpus", "check"):
        variable = f"WORKBENCH_{name.upper()}"
        _compare(hellos, f"values of {variable}", itemgetter(name), f"set {variable} alike on every rank")
    _compare(
        hellos,
        "timeouts",
        lambda h: f"{h['timeout_s']:g} s",
        "pass the same timeout_s= or set WORKBENCH_TIMEOUT_S alike",
    )
    _compare(hellos, "torch versions", lambda h: str(h["torch"]), "install the same torch on every rank")
    if not settings.share_gpus:
        _refuse_shared_gpus(hellos)
    return {
        r: Member(world_rank=r, host=h["host"], pid=h["pid"], started=h["started"], pid_namespace=h["pid_namespace"])
        for r, h in enumerate(hellos)
    }


def _introduce(group_map: GroupMap, *, device: str, settings: Settings, timeout_s: float) -> dict[str, Any]:
    """What this rank is and came with, as JSON. Local."""
    process = psutil.Process()
    return {
        "host": host_id(),
        "pid_namespace": os.readlink("/proc/self/ns/pid"),
        "pid": process.pid,
        "started": process.create_time(),
        "map": group_map.digest,
        "map_text": f"{group_map.system} {_sizes_text(group_map)}",
        "map_world": group_map.world_size,
        "device": device,
        "gpu": str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid) if device == "cuda" else None,
        "fusion": settings.fusion,
        "custom_all_reduce": settings.custom_all_reduce,
        "multicast": settings.multicast,
        "share_gpus": settings.share_gpus,
        "check": settings.check,
        "timeout_s": timeout_s,
        "torch": torch.__version__,
    }


def _compare(
    hellos: Sequence[dict[str, Any]], what: str, read: Callable[[dict[str, Any]], object], advice: str
) -> None:
    ranks_by_value = defaultdict(list)
    for world_rank, hello in enumerate(hellos):
        ranks_by_value[read(hello)].append(world_rank)
    if len(ranks_by_value) > 1:
        found = "; ".join(f"{ranks_text(ranks)} came with {value}" for value, ranks in ranks_by_value.items())
        raise PlanMismatchError(f"the {what} of the ranks differ, so no group was made: {found}; {advice}")


def _refuse_shared_gpus(hellos: Sequence[dict[str, Any]]) -> None:
    ranks_by_gpu = defaultdict(list)
    for world_rank, hello in enumerate(hellos):
        if hello["gpu"] is not None:
            ranks_by_gpu[hello["host"], hello["gpu"]].append(world_rank)
    for (_, gpu), ranks in ranks_by_gpu.items():
        if len(ranks) > 1:
            raise ArgumentError(
                f"{ranks_text(ranks)} all use GPU {gpu}, which NCCL refuses; call "
                f"torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before the Session, start fewer ranks, or set "
                f"WORKBENCH_SHARE_GPUS=1 for right results and times that mean nothing"
            )


def _sizes_text(group_map: GroupMap) -> str:
    return " ".join(f"{name}={value}" for name, value in group_map.sizes.items() if value not in (1, None, False))
