"""Processes that a recorded program starts: they record themselves too, and their ends are noted.

An environment that a program puts together for a child is completed. A child that was ended by a signal says nothing
itself: whoever waits for it notes its status, in `exits.jsonl` beside the traces, and whether it had sent the signal.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from workbench.observe.environment import is_recorded, recorded_environment

EXITS = "exits.jsonl"

_directory = ""
_sent: dict[int, tuple[int, int]] = {}  # by pid: the last signal that this process sent to a child, and when


def pass_on(directory: str) -> None:
    """Have what this process starts by os.exec and os.spawn record into `directory`. Local; once a process."""
    global _directory
    _directory = directory
    for name, at in (("execve", 2), ("execvpe", 2), ("posix_spawn", 2), ("posix_spawnp", 2), ("spawnve", 3)):
        setattr(os, name, _with_environment(getattr(os, name), at))


def install(module: ModuleType) -> None:
    """Called once subprocess, or multiprocessing's way to fork, has been executed."""
    (_install_popen if module.__name__ == "subprocess" else _install_fork)(module.Popen)


def _install_popen(popen_class: Any) -> None:
    start, handle = popen_class.__init__, popen_class._handle_exitstatus  # the latter is told the status of waitpid

    @functools.wraps(start)
    def recorded_start(popen: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > _ENV_AT and args[_ENV_AT] is not None:
            args = (*args[:_ENV_AT], _complete(args[_ENV_AT]), *args[_ENV_AT + 1 :])
        elif kwargs.get("env") is not None:
            kwargs["env"] = _complete(kwargs["env"])
        elif not is_recorded(os.environ) and len(args) <= _ENV_AT:
            kwargs["env"] = _complete(os.environ)
        start(popen, *args, **kwargs)

    @functools.wraps(handle)
    def recorded_handle(popen: Any, *args: Any, **kwargs: Any) -> None:
        handle(popen, *args, **kwargs)
        _note_exit(popen.pid, popen.returncode)

    popen_class.__init__, popen_class._handle_exitstatus = recorded_start, recorded_handle
    popen_class.send_signal = _noting_signal(popen_class.send_signal)


def _install_fork(popen_class: Any) -> None:
    poll = popen_class.poll

    @functools.wraps(poll)
    def recorded_poll(popen: Any, *args: Any, **kwargs: Any) -> Any:
        running = popen.returncode is None
        status = poll(popen, *args, **kwargs)
        if running and status is not None:
            _note_exit(popen.pid, status)
        return status

    popen_class.poll = recorded_poll
    popen_class._send_signal = _noting_signal(popen_class._send_signal)


def _noting_signal(send: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(send)
    def noting(popen: Any, number: int) -> Any:
        if popen.poll() is None:  # what ended by itself, and was not looked at yet, is not ended by this signal
            _sent[popen.pid] = int(number), time.monotonic_ns()
        return send(popen, number)

    return noting


_ENV_AT = 10  # of Popen's positional arguments after self


def _with_environment(original: Callable[..., Any], at: int) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > at and args[at] is not None:
            args = (*args[:at], _complete(args[at]), *args[at + 1 :])
        elif kwargs.get("env") is not None:
            kwargs["env"] = _complete(kwargs["env"])
        return original(*args, **kwargs)

    return call


def _complete(environ: Any) -> Any:
    """`environ` with ours added; as it is where its names are not texts."""
    try:
        return recorded_environment(dict(environ), _directory)
    except (TypeError, AttributeError, ValueError):
        return environ


def _note_exit(pid: int, status: int | None) -> None:
    """One line of less than a pipe's buffer, appended at once: lines of several processes do not mix."""
    if status is None:
        return
    number, sent_ns = _sent.pop(pid, (0, 0))
    by_parent = status < 0 and number == -status
    time_ns = sent_ns if by_parent else time.monotonic_ns()  # such a child is often waited for much later
    line = json.dumps({"pid": pid, "status": status, "time_ns": time_ns, "by_parent": by_parent})
    try:
        fd = os.open(os.path.join(_directory, EXITS), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError:
        return  # the directory is gone: nobody reads it any more
    with os.fdopen(fd, "w") as file:
        file.write(line + "\n")
