"""Waits for the GPU that an interrupt ends: the kernels that hold the device up are told to stop.

On CUDA tensors a collective returns at once; what hangs is the next wait for the device: torch.cuda.synchronize(),
.item(), .cpu(), event.synchronize(). That is a call into CUDA, in which no Python handler runs, so Ctrl-C alone changes
nothing. Here a thread hears of each interrupt. If Python has not handled it a moment later, the main thread waits in
C++; then all NCCL communicators of this process are aborted: their kernels end, the device's wait with them, and the
interrupt is raised where the main thread waited. What the collective was to fill is not valid then, and the groups
cannot be used again: `CallRecorder` refuses them, and a rebuild makes new ones.

Our own CUDA kernels (backends/custom.py) are no part of this: they poll for their peers with a bound, and end by
themselves at the Session's timeout. Nor can anything be done for a call that keeps Python's lock while it waits.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from ipykernel import kernelbase

_PATIENCE_S = 0.3  # a Python loop and a polled wait end within milliseconds

_handled = 0  # how many interrupts Python has raised in the main thread


def end_waits_on_interrupt(end: Callable[[], None]) -> None:
    """Have `end()` called in a thread whenever SIGINT is not raised in the main thread within 0.3 s.

    Local; from the main thread; once a process. Takes the process's only signal wakeup descriptor.
    """
    read_fd, write_fd = os.pipe()
    for fd in (read_fd, write_fd):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGINT, _raise_interrupt)
    kernelbase.default_int_handler = _raise_interrupt  # type: ignore[attr-defined]  # it sets this one for each cell
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a child's interrupt is not this process's
    threading.Thread(target=_watch, args=(read_fd, end), name="gpu-waits", daemon=True).start()


def abort_nccl() -> None:
    """Abort every NCCL communicator of this process, all at once, and return when they are gone. Local; any thread.

    Not one after the other: an abort frees memory, for which CUDA waits until the kernels of the others have ended.
    """
    cuda = torch.device("cuda")
    backends = [
        group._get_backend(cuda)
        for group in list(dist.distributed_c10d._world.pg_map)
        if "nccl" in str(dist.get_backend(group))
    ]
    aborts = [threading.Thread(target=backend.abort, name="abort-nccl", daemon=True) for backend in backends]
    for abort in aborts:
        abort.start()
    for abort in aborts:
        abort.join()


def _raise_interrupt(*args: Any) -> NoReturn:
    global _handled
    _handled += 1
    signal.default_int_handler(*args)


def _watch(read_fd: int, end: Callable[[], None]) -> None:
    poll = select.poll()
    poll.register(read_fd, select.POLLIN)
    handled = _handled
    while True:
        poll.poll()
        time.sleep(_PATIENCE_S)
        told = os.read(read_fd, 4096)  # interrupts that came meanwhile are one with the first
        if signal.SIGINT in told and _handled == handled:
            end()
        handled = _handled
