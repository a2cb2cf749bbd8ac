"""The moment at which a watcher ended a job: what its ranks did after that tells of the watcher, not of them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

_FILE = "ended.json"
_STATUS = "command.json"
_MOST_S = 1e6  # more than any deadline that is allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """When a job was ended, on the monotonic clock of its host; and the patience with which it was judged, seconds.

    interrupted: by Ctrl-C, and not at its deadline. stopped_pids: processes that were stopped then.
    """

    boot_id: str
    monotonic_ns: int
    deadline_s: float
    interrupted: bool = False
    stopped_pids: tuple[int, ...] = ()


def mark_ended(
    directory: str | os.PathLike[str],
    *,
    deadline_s: float,
    interrupted: bool = False,
    stopped_pids: Iterable[int] = (),
) -> None:
    """Note that the job which records into `directory` is ended now."""
    ended = Ended(
        boot_id=boot_id(),
        monotonic_ns=time.monotonic_ns(),
        deadline_s=deadline_s,
        interrupted=interrupted,
        stopped_pids=tuple(stopped_pids),
    )
    Path(directory, _FILE).write_text(json.dumps(asdict(ended)))


def read_ended(directories: Iterable[str | os.PathLike[str]]) -> Ended | None:
    """The first such note in these directories; None for a job that runs or ended by itself. Nonsense is no note."""
    for directory in directories:
        try:
            data = json.loads(Path(directory, _FILE).read_text())
            found = Ended(
                boot_id=str(data["boot_id"]),
                monotonic_ns=int(data["monotonic_ns"]),
                deadline_s=float(data["deadline_s"]),
                interrupted=bool(data.get("interrupted", False)),
                stopped_pids=tuple(map(int, data.get("stopped_pids", ()))),
            )
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            continue
        if 0 <= found.monotonic_ns < 1 << 63 and 0 <= found.deadline_s <= _MOST_S:
            return found
    return None


def mark_status(directory: str | os.PathLike[str], status: int) -> None:
    """Note the exit status of the command whose job recorded into `directory`."""
    Path(directory, _STATUS).write_text(json.dumps({"status": status}))


def went_well(directory: str | os.PathLike[str]) -> bool:
    """Whether such a note says 0: the children that the command ended by then were no longer needed."""
    try:
        return bool(json.loads(Path(directory, _STATUS).read_text())["status"] == 0)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return False


def boot_id() -> str:
    """The kernel's name for this boot: processes that share it share a monotonic clock. "?" where it is hidden."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "?"
