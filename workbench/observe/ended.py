"""The moment at which a watcher ended a job: what its ranks did after that tells of the watcher, not of them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_FILE = "ended.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """When a job was ended, on the monotonic clock of its host; and the patience with which it was judged, seconds."""

    boot_id: str
    monotonic_ns: int
    deadline_s: float


def mark_ended(directory: str | os.PathLike[str], *, deadline_s: float) -> None:
    """Note that the job which records into `directory` is ended now."""
    ended = {"boot_id": boot_id(), "monotonic_ns": time.monotonic_ns(), "deadline_s": deadline_s}
    Path(directory, _FILE).write_text(json.dumps(ended))


def read_ended(directories: Iterable[str | os.PathLike[str]]) -> Ended | None:
    """The first such note in these directories; None for a job that ended by itself or runs."""
    for directory in directories:
        try:
            data = json.loads(Path(directory, _FILE).read_text())
            return Ended(
                boot_id=str(data["boot_id"]),
                monotonic_ns=int(data["monotonic_ns"]),
                deadline_s=float(data["deadline_s"]),
            )
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return None


def boot_id() -> str:
    """The kernel's name for this boot: processes that share it share a monotonic clock. "?" where it is hidden."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "?"
