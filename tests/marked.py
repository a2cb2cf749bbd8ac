"""What a command has started, told by its mark, so that other jobs on the machine are never looked at or ended."""

from __future__ import annotations

import os

import psutil

from workbench.launch import MARK
from workbench.launch.survivors import mark_pid


def started_by(pid: int) -> list[psutil.Process]:
    """The running processes of this user that carry the mark of the command `pid`, which may be gone."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.uids().real == os.getuid() and process.status() != psutil.STATUS_ZOMBIE
            if ours and process.pid != pid and mark_pid(process.environ().get(MARK, "")) == pid:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue
    return found


def assert_nothing_runs_of(pid: int) -> None:
    """A minute at most: a process that was killed may need a while on a busy machine."""
    _, alive = psutil.wait_procs(started_by(pid), timeout=60)
    assert alive == []
