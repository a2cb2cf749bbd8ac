"""Cells with `await` in a rank: they end, and an interrupt ends them wherever they stand.

ipykernel 7 asks its thread for subshells which thread is the main one, before it awaits a cell. An ipyparallel engine
has no such thread: the answer to the cell was never sent. To be removed once ipyparallel's kernel looks after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from ipykernel import kernelbase
from ipyparallel.engine.kernel import IPythonParallelKernel


class _NoSubshells:
    """In the place of the thread for subshells: there is none, and the main thread runs the cells."""

    parent_thread = threading.main_thread()

    def __bool__(self) -> bool:
        return False


class AwaitingKernel(IPythonParallelKernel):  # type: ignore[misc]  # ipyparallel is untyped
    """ipyparallel's kernel with cells that may await."""

    shell_channel_thread = _NoSubshells()
    _supports_kernel_subshells = False

    @contextlib.contextmanager
    def _cancel_on_sigint(self, future: asyncio.Future[Any]) -> Iterator[None]:
        """Have an interrupt cancel a cell that awaits, and raise KeyboardInterrupt in one that runs or waits in a call.

        ipykernel's own cancels alone, and does not wake an event loop that has nothing else to do.
        """

        def interrupt(*args: Any) -> None:
            if asyncio.current_task() is future:
                kernelbase.default_int_handler(*args)  # type: ignore[attr-defined]  # which gpu_waits may replace
            future.get_loop().call_soon_threadsafe(future.cancel)

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
