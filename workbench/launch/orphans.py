"""A rank that outlives its launcher helps nobody: end a process with its parent, or with any other process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable

from workbench.launch.survivors import MARK, mark_lives, mark_pid

_PR_SET_PDEATHSIG = 1
_GRACE_S = 3.0


def die_with_parent() -> None:
    """Have the kernel SIGKILL this process when its parent ends. Local; Linux; also when the parent was SIGKILLed.

    "Parent" is the thread that started this process: it must be one that lives as long as its process.
    """
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended between the two lines
        os._exit(1)


def end_with_starter() -> None:
    """End this process with its parent, and with the command that started the job (WORKBENCH_RUN), if that is gone too.

    A process whose starter died while it was still importing torch has been handed to init by now: its parent tells it
    nothing, the mark does.
    """
    die_with_parent()
    mark = os.environ.get(MARK, "")
    if mark_pid(mark):
        end_with(mark)


def end_with(
    owner: str, *, before_kill: Callable[[], None] = lambda: None, unless: Callable[[], bool] = lambda: False
) -> None:
    """End this process when the process of the mark `owner` ends: SIGTERM at once, SIGKILL three seconds later.

    Unlike die_with_parent it does not matter who started whom, nor from which thread. Local; starts a daemon thread.
    before_kill: called ahead of the SIGKILL.   unless: whether this process may go on by then.
    """
    fd = -1
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(mark_pid(owner))
    if fd < 0 or not mark_lives(owner):
        _end(before_kill, unless)
    else:
        threading.Thread(
            target=_wait_and_end, args=(fd, before_kill, unless), name="end-with-owner", daemon=True
        ).start()


def _wait_and_end(fd: int, before_kill: Callable[[], None], unless: Callable[[], bool]) -> None:
    watch = select.poll()
    watch.register(fd, select.POLLIN)
    watch.poll()
    _end(before_kill, unless)


def _end(before_kill: Callable[[], None], unless: Callable[[], bool]) -> None:
    if unless():
        return
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    before_kill()
    os.kill(os.getpid(), signal.SIGKILL)
