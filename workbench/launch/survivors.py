"""Processes of ours that outlived the command which started them: how they are marked, found and ended.

Every process of a job carries WORKBENCH_RUN=<pid>.<start time>.<pid namespace> of the process it belongs to: the
command that started it, or the controller of a cluster that is kept. If that process is gone, what still carries the
mark is a survivor. Only processes of the own user are ever looked at, and marks of another pid namespace (a container)
are left alone, since their pids mean nothing here. The start time is in clock ticks since boot: no clock change moves
it.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

import psutil

from workbench.backends.segments import process_lives, start_time_of

MARK = "WORKBENCH_RUN"
_MOST_LOOKS = 5


@dataclass(frozen=True, slots=True)
class Survivor:
    """A process of an earlier job whose starter is gone."""

    pid: int
    command: str


def run_tag(pid: int | None = None) -> str:
    """The mark for processes that belong to `pid` (default: this process)."""
    pid = os.getpid() if pid is None else pid
    return f"{pid}.{start_time_of(pid)}.{_namespace()}"


def mark_pid(mark: str) -> int:
    """The pid that a mark names; 0 if it is not a mark of ours, or one of another pid namespace."""
    parts = mark.split(".")
    ours = len(parts) == 3 and all(part.isdigit() for part in parts) and parts[2] == _namespace()
    return int(parts[0]) if ours else 0


def mark_lives(mark: str) -> bool:
    """True while that very process runs: neither a zombie nor a later process with the same pid."""
    pid = mark_pid(mark)
    return pid > 0 and process_lives(pid, int(mark.split(".")[1]))


def find_survivors() -> tuple[Survivor, ...]:
    """Marked processes of this user whose starter is gone."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.uids().real != os.getuid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            mark = process.environ().get(MARK)
            if mark and not _starter_lives(mark):
                found.append(Survivor(process.pid, " ".join(process.cmdline())[:200]))
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue
    return tuple(found)


def stop_survivors(survivors: tuple[Survivor, ...], *, grace_s: float = 3.0) -> tuple[Survivor, ...]:
    """Ask them to end, then make them; give back those that are gone."""
    processes = []
    for survivor in survivors:
        try:
            process = psutil.Process(survivor.pid)
            if not _starter_lives(process.environ().get(MARK, "")):
                process.terminate()
                processes.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=grace_s)
    return tuple(s for s in survivors if not psutil.pid_exists(s.pid))


def stop_marked(mark: str) -> None:
    """End at once every process of this user that carries `mark`, but this one.

    A rank's own children are among them, also those whose parent is gone. Looks again until there are no more.
    """
    for _ in range(_MOST_LOOKS):
        found = [p for p in psutil.process_iter() if p.pid != os.getpid() and _carries(p, mark)]
        if not found:
            return
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=1)


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        ours = process.uids().real == os.getuid() and process.status() != psutil.STATUS_ZOMBIE
        return ours and bool(mark) and process.environ().get(MARK) == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
        return False


def _starter_lives(mark: str) -> bool:
    """True as well for what is not a mark of ours: left alone."""
    return mark_pid(mark) == 0 or mark_lives(mark)


def _namespace() -> str:
    """The inode of this process's pid namespace."""
    return os.readlink("/proc/self/ns/pid").strip("pid:[]")
