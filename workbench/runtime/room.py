"""Room: do the bytes that a group's workspaces will take fit, on every host and GPU? Asked before any is allocated.

Members of one host draw on the same memory, so what they ask for is added up. A rank whose control group is smaller
than the machine has no more than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from workbench.backends.base import Room
from workbench.backends.places import host_id
from workbench.backends.segments import SEGMENT_DIRECTORY, free_bytes
from workbench.fabric import name_ranks

_LIMITLESS = 1 << 60  # what cgroup v1 writes for no limit is near 2^63


@dataclass(frozen=True, slots=True)
class Claim:
    """What one rank asks of one pool of memory, and what it sees free there. Ranks with equal `pool` share it."""

    pool: str
    what: str
    asked: int
    free: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_claims(room: Room) -> tuple[Claim, ...]:
    """The claims that a workspace of this size makes on this rank. Local; nothing is allocated."""
    host = host_id()
    claims = []
    if room.shm:
        device = Path(SEGMENT_DIRECTORY).stat().st_dev
        claims.append(Claim(f"{host} shm {device}", SEGMENT_DIRECTORY, room.shm, free_bytes()))
        free, limited_by = free_memory()
        claims.append(Claim(f"{host} memory {limited_by}", "the host's memory", room.shm, free))
    if room.gpu:
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        claims.append(Claim(f"gpu {uuid}", "GPU memory", room.gpu, torch.cuda.mem_get_info()[0]))
    return tuple(claims)


def decide_room(told: Sequence[tuple[int, Iterable[Claim]]]) -> str:
    """Why the claims of (world_rank, claims) do not fit, naming ranks, bytes asked and bytes free; "" if they do. Pure.

    Equal input gives equal text on every member. A pool has what the member that sees least of it sees.
    """
    pools: dict[str, list[tuple[int, Claim]]] = {}
    for world_rank, claims in told:
        for claim in claims:
            pools.setdefault(claim.pool, []).append((world_rank, claim))
    problems = []
    for sharers in pools.values():
        asked = sum(claim.asked for _, claim in sharers)
        free = min(claim.free for _, claim in sharers)
        if asked > free:
            ranks = name_ranks(rank for rank, _ in sharers)
            problems.append(f"{ranks}: {asked} bytes asked{_split(sharers)} of {sharers[0][1].what}, {free} are free")
    return "; ".join(problems)


def _split(sharers: Sequence[tuple[int, Claim]]) -> str:
    """How several ranks' bytes add up: ' (600 each)', or what each rank asks if that differs."""
    if len(sharers) == 1:
        return ""
    parts = {claim.asked for _, claim in sharers}
    if len(parts) == 1:
        return f" ({parts.pop()} each)"
    return f" ({', '.join(f'{claim.asked} by world rank {rank}' for rank, claim in sharers)})"


def free_memory(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes of memory that this process may still take, and the control group that says so.

    The least of what the machine has and what each control group from this process's up allows; pages of files can be
    given back and count as free. Units: bytes.   Local.
    """
    free = _field(root / "proc/meminfo", "MemAvailable:") * 1024
    name = "/"
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            mount, files = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        elif number == "0":
            mount, files = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        else:
            continue
        for place in _upwards(mount, path):
            limit = _number(place / files[0])
            if limit is None or limit >= _LIMITLESS:
                continue
            used = _number(place / files[1]) or 0
            left = max(0, limit - used + _reclaimable(place / "memory.stat"))
            if left < free:
                free, name = left, str(place.relative_to(root))
    return free, name


def _upwards(mount: Path, path: str) -> list[Path]:
    """The directories of a control group and of those it is in; a container may see itself as the mount."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [mount.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]


def _reclaimable(stat: Path) -> int:
    """Bytes of file pages. cgroup v1 counts those of the groups inside under names of their own."""
    names = ("inactive_file", "active_file")
    return sum(_field(stat, f"total_{name}") or _field(stat, name) for name in names)


def _field(file: Path, name: str) -> int:
    """The number behind a name at the start of a line; 0 if there is no such file or line."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(words[1]) for words in map(str.split, lines) if words[:1] == [name]), 0)


def _number(file: Path) -> int | None:
    """The whole number in a file; None if there is no such file, or "max" in it."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
