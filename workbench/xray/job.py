"""The command as it runs: a session of its own, and everything that descends from it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from types import TracebackType

import psutil

from workbench.errors import ArgumentError
from workbench.launch import MARK, run_tag
from workbench.observe import recorded_environment

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None)
_GRACE_S = 2.0


class Job:
    """A recorded command. Leaving the block ends whatever of it still runs; nothing else is ever touched.

    Should this process be killed, the command is told to end (SIGTERM), as a launcher tells its ranks.

    stdout: where the command's output goes; None is ours.
    """

    def __init__(self, command: Sequence[str], directory: str, *, stdout: int | None = None) -> None:
        """Start it. Raises ArgumentError for a command that is not there or cannot be run."""
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of the job come to us, not to init
        self._before = {p.pid for p in psutil.Process().children(recursive=True)}
        environment = recorded_environment(os.environ, directory) | {MARK: run_tag()}
        try:
            self._process = subprocess.Popen(
                list(command), env=environment, stdout=stdout, start_new_session=True, preexec_fn=_end_with_parent
            )
        except OSError as e:
            raise ArgumentError(f"{command[0]!r} cannot be run: {e.strerror}; give the command after --") from e

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None or self.status is None:
            self.end()

    @property
    def status(self) -> int | None:
        """The command's exit status, as a shell would give it; None while it runs."""
        status = self._process.poll()
        return status if status is None or status >= 0 else 128 - status

    def wait(self, timeout_s: float) -> None:
        """Until the command ends, at most timeout_s."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def interrupt(self) -> None:
        """What Ctrl-C in its terminal would do: SIGINT to the command's process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)

    def end(self) -> None:
        """End everything that descends from the command: politely, and after two seconds for certain."""
        deadline = time.monotonic() + _GRACE_S
        self._signal(signal.SIGTERM)
        while self.family() and time.monotonic() < deadline:
            self._process.poll()
            time.sleep(0.02)
        while self.family() and time.monotonic() < deadline + 10 * _GRACE_S:  # a fork may outrun one round
            self._signal(signal.SIGKILL)
            self._process.poll()
            time.sleep(0.02)
        self.wait(_GRACE_S)

    def family(self) -> list[psutil.Process]:
        """Descendants that are not dead. Zombies are reaped on the way."""
        alive = []
        for process in psutil.Process().children(recursive=True):
            if process.pid in self._before:
                continue
            try:
                if process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
                elif process.pid != self._process.pid and process.ppid() == os.getpid():
                    os.waitpid(process.pid, os.WNOHANG)
            except (psutil.NoSuchProcess, ChildProcessError):
                continue
        return alive

    def _signal(self, number: int) -> None:
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
