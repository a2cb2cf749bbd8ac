"""Processes of ours that outlived the command which started them: how they are marked, found and ended.

Every process of a job carries WORKBENCH_RUN=<pid>.<start time> of the command that started it. If that process is gone,
what still carries the mark is a survivor. Only processes of the own user are ever looked at.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

MARK = "WORKBENCH_RUN"


@dataclass(frozen=True, slots=True)
class Survivor:
    """A process of an earlier job whose starter is gone."""

    pid: int
    command: str


def run_tag() -> str:
    """The mark for children of this process."""
    process = psutil.Process()
    return f"{process.pid}.{process.create_time():.2f}"


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


def _starter_lives(mark: str) -> bool:
    pid, _, started = mark.partition(".")
    if not pid.isdigit() or not started:
        return True  # not a mark of ours: leave it alone
    try:
        return f"{psutil.Process(int(pid)).create_time():.2f}" == started
    except psutil.NoSuchProcess:
        return False
