"""The stacks of a rank that hangs: dumped by a signal handler in C, so it answers inside C++ and with the GIL taken."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

STACK_SIGNAL = signal.SIGRTMAX - 3  # no program is known to use it; the usual ones belong to launchers and schedulers
_ANSWER_S = 0.7
_OURS = os.path.dirname(__file__) + os.sep  # the recording itself, which stands between the program and torch
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a Python stack."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


def register_stack_dump(directory: str | os.PathLike[str]) -> None:
    """On STACK_SIGNAL append the stacks of all threads to `stacks-<pid>.txt`. Local.

    Nothing is done where the program itself handles that signal; without the file no one sends it.
    """
    if signal.getsignal(STACK_SIGNAL) is not signal.SIG_DFL:
        return
    path = _path(directory, os.getpid())
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.write(file, f"main 0x{threading.main_thread().ident or 0:016x}\n".encode())
    faulthandler.register(STACK_SIGNAL, file, all_threads=True)


def dump_stacks(directory: str | os.PathLike[str], pids: Iterable[int]) -> Mapping[int, tuple[Frame, ...]]:
    """The main thread's frames of each process, innermost first; without those that gave none. Takes less than 1 s."""
    before = {}
    for pid in pids:
        path = _path(directory, pid)
        if path.exists():
            try:
                size = path.stat().st_size
                os.kill(pid, STACK_SIGNAL)
            except (ProcessLookupError, PermissionError):
                continue
            before[pid] = size
    found: dict[int, tuple[Frame, ...]] = {}
    size_then = dict(before)
    deadline = time.monotonic() + _ANSWER_S
    while len(found) < len(before) and time.monotonic() < deadline:
        time.sleep(0.02)
        for pid in before.keys() - found.keys():
            text = _path(directory, pid).read_text(errors="replace")
            if len(text.encode()) > before[pid] and len(text) == size_then[pid]:  # and it has stopped growing
                frames = _main_frames(text)
                if frames:
                    found[pid] = frames
            size_then[pid] = len(text)
    return found


def _main_frames(text: str) -> tuple[Frame, ...]:
    """The frames of the main thread in the last dump of a file."""
    main = text.partition("\n")[0].removeprefix("main ")
    _, _, rest = text.rpartition(f"hread {main}")
    frames = []
    for line in rest.splitlines()[1:]:
        match = _FRAME.fullmatch(line)
        if match is None:
            break
        if not match["file"].startswith(_OURS):
            frames.append(Frame(match["function"], match["file"], int(match["line"])))
    return tuple(frames)


def _path(directory: str | os.PathLike[str], pid: int) -> Path:
    return Path(directory) / f"stacks-{pid}.txt"
