"""Runs a program of tests/bugs/programs as torchrun would, on ranks forked from this process, recorded from inside.

A rank has torch imported already, so a world starts in a tenth of a second. When a rank fails the others are ended, as
torchrun does; a world in which nothing happens any more is judged while it hangs, and then ended. A rank that is
through, or has failed, does not leave while another one still makes a group: on a busy machine that one would fail.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import mmap
import os
import runpy
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.forked import rank_environment
from workbench.launch import die_with_parent
from workbench.trace import TraceError, read_progress
from workbench.xray import Verdict, judge

PROGRAMS = Path(__file__).parent / "programs"
QUIET_S = 1.5  # without an event, and with hardly any computing, after which a world is judged
GRACE_S = 0.5  # without an event after which, once a rank has failed, the others are ended
LIMIT_S = 60.0
STAY_S = 1.0  # at most, that a rank stays until the others have made their groups
_IDLE_TICKS_A_SECOND = 4  # of all ranks together; on a busy machine a rank may compute for long between two events


@dataclass(frozen=True)
class World:
    """How a program's ranks ended: each one's status (negative: a signal), and what they printed, rank by rank.

    hung: what `look` said of them when nothing happened any more; None if they ended by themselves.
    """

    statuses: tuple[int, ...]
    output: str
    hung: Verdict | str | None


@dataclass(frozen=True)
class Run:
    """A recorded world and the verdict on it."""

    verdict: Verdict
    statuses: tuple[int, ...]
    hung: bool
    output: str


def run_program(name: str, num_ranks: int, directory: Path, *, correct: bool, quiet_s: float = QUIET_S) -> Run:
    """Run one program recorded, and judge it. A correct one is waited for, however long it is quiet."""
    traces = directory / "trace"
    traces.mkdir(mode=0o700)

    def record() -> None:
        os.environ["WORKBENCH_OBSERVE"] = str(traces)
        _record()

    def look() -> Verdict | None:
        verdict = judge(traces, deadline_s=quiet_s, running=True)
        return verdict if verdict.waiting and verdict.findings else None

    world = run_world(
        name,
        num_ranks,
        directory,
        correct=correct,
        prepare=record,
        quiet_s=float("inf") if correct else quiet_s,
        look=look,
    )
    verdict = world.hung if isinstance(world.hung, Verdict) else judge(traces)
    return Run(verdict, world.statuses, world.hung is not None, world.output)


def run_world(
    name: str,
    num_ranks: int,
    directory: Path,
    *,
    correct: bool,
    prepare: Callable[[], None],
    quiet_s: float,
    look: Callable[[], Verdict | str | None],
) -> World:
    """Run one program on forked ranks, each after prepare(). Quiet for quiet_s, they are ended if look() says so."""
    traces = directory / "trace"
    traces.mkdir(mode=0o700, exist_ok=True)
    arguments = [str(PROGRAMS / f"{name}.py"), *(["--correct"] if correct else [])]
    making = mmap.mmap(-1, num_ranks)
    starters, pids = [], []
    for rank in range(num_ranks):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(write_end)
            _rank(rank, read_end, arguments, prepare, directory / f"rank-{rank}.txt", making)
        os.close(read_end)
        starters.append(write_end)
        pids.append(pid)
    # Only now: a fork while the store's thread resolves a name would leave the child with libc's resolver locked.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S))
    for starter in starters:
        os.write(starter, store.port.to_bytes(8, "little"))
        os.close(starter)
    world = _World(pids, traces)
    try:
        hung = world.watch(quiet_s, look)
    finally:
        world.end(signal.SIGKILL)
    output = "\n".join((directory / f"rank-{r}.txt").read_text(errors="replace") for r in range(num_ranks))
    return World(tuple(world.statuses[p] for p in pids), output, hung)


class _World:
    """The ranks' processes, and how they ended."""

    def __init__(self, pids: list[int], traces: Path) -> None:
        self.statuses: dict[int, int] = {}
        self._pids, self._traces = pids, traces
        self._deadline = time.monotonic() + LIMIT_S

    def watch(self, quiet_s: float, look: Callable[[], Verdict | str | None]) -> Verdict | str | None:
        """Until all have ended; what `look` says, if nothing happens for quiet_s and it says something."""
        events, ticks, moved = 0, 0, time.monotonic()
        failed: float | None = None
        while self._running():
            time.sleep(0.02)
            now = time.monotonic()
            if now > self._deadline:
                raise AssertionError(f"ranks still ran after {LIMIT_S} s")
            if failed is None and any(self.statuses.values()):
                failed = now
            if failed is not None and now > max(failed, moved) + GRACE_S:
                self.end(signal.SIGTERM)
            recorded, computed = self._num_events(), sum(map(_ticks, self._pids))
            if recorded != events or computed > ticks + _IDLE_TICKS_A_SECOND * quiet_s:
                events, ticks, moved = recorded, computed, now
            elif now - moved > quiet_s:
                said = look()
                if said is not None:
                    return said
                ticks, moved = computed, now
        return None

    def end(self, number: int) -> None:
        """Send a signal to whoever runs, and wait for it. Ranks that ignore it are killed."""
        for pid in self._running():
            os.kill(pid, number)
        until = time.monotonic() + 2
        while self._running():
            time.sleep(0.01)
            if time.monotonic() > until:
                for pid in self._running():
                    os.kill(pid, signal.SIGKILL)

    def _running(self) -> list[int]:
        for pid in self._pids:
            if pid not in self.statuses:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.statuses[pid] = os.waitstatus_to_exitcode(status)
                    line = {"pid": pid, "status": self.statuses[pid], "time_ns": time.monotonic_ns()}
                    with (self._traces / "exits.jsonl").open("a") as file:
                        file.write(json.dumps(line) + "\n")
        return [pid for pid in self._pids if pid not in self.statuses]

    def _num_events(self) -> int:
        total = 0
        for path in self._traces.rglob("*.wbtrace"):
            try:
                total += read_progress(path)
            except (TraceError, OSError):
                continue
        return total


def _ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def _rank(
    rank: int, pipe: int, arguments: list[str], prepare: Callable[[], None], output: Path, making: mmap.mmap
) -> None:
    """The child: prepare, run the program as __main__, end as an interpreter would."""
    leave = os._exit
    try:
        die_with_parent()
        port = int.from_bytes(os.read(pipe, 8), "little")
        fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for stream in (1, 2):
            os.dup2(fd, stream)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        faulthandler.disable()
        warnings.resetwarnings()  # pytest's "error" is not the program's
        status = 0
        _stay_until_groups_are_made(rank, making)
        with rank_environment(rank, len(making), port):
            prepare()
            sys.argv = arguments
            try:
                runpy.run_path(arguments[0], run_name="__main__")
            except SystemExit as e:
                status = e.code if isinstance(e.code, int) else int(e.code is not None)
            except BaseException:
                status = 1
                sys.excepthook(*sys.exc_info())
        _stay(making)
        os._exit(status)
    finally:
        leave(70)


def _stay_until_groups_are_made(rank: int, making: mmap.mmap) -> None:
    """Have this rank say when it makes a group, and destroy its own only when no rank does. Below the recording."""

    def during(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def made(*args: Any, **kwargs: Any) -> Any:
            making[rank] = 1
            try:
                return make(*args, **kwargs)
            finally:
                making[rank] = 0

        return made

    def after(destroy: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(destroy)
        def destroyed(*args: Any, **kwargs: Any) -> None:
            _stay(making)
            destroy(*args, **kwargs)

        return destroyed

    for name, wrap in (("init_process_group", during), ("new_group", during), ("destroy_process_group", after)):
        wrapped = wrap(getattr(dist, name))
        setattr(dist, name, wrapped)
        setattr(dist.distributed_c10d, name, wrapped)


def _stay(making: mmap.mmap) -> None:
    until = time.monotonic() + STAY_S
    while any(making[:]) and time.monotonic() < until:
        time.sleep(0.002)


def _record() -> None:
    """Put the recording in place in a process that has torch.distributed loaded already."""
    from workbench.observe.imports import watch_imports

    before = dict(vars(dist.distributed_c10d))
    watch_imports()
    for name, value in vars(dist.distributed_c10d).items():
        if value is not before.get(name) and getattr(dist, name, None) is before.get(name):
            setattr(dist, name, value)
