"""Real ranks for tests: processes forked from this one, which has torch imported. Sixteen start in about 50 ms.

Every run has a deadline. A rank that raises is reported with its traceback; a rank that is killed is reported as such.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from workbench.launch import die_with_parent


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: its value, its exception (with traceback text), or the signal that killed it."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    signal: int = 0
    elapsed_s: float = 0.0


def run_ranks(num_ranks: int, fn: Callable[[int], Any], *, timeout_s: float = 60.0) -> list[Any]:
    """Run fn(rank) on forked ranks and give back the values in rank order; raise if any rank did not return."""
    outcomes = run_outcomes(num_ranks, fn, timeout_s=timeout_s)
    bad = [o for o in outcomes if o.error is not None or o.signal]
    if bad:
        raise AssertionError("\n".join(f"rank {o.rank}: signal {o.signal} {o.error!r}\n{o.trace}" for o in bad))
    return [o.value for o in outcomes]


def run_outcomes(
    num_ranks: int,
    fn: Callable[[int], Any],
    *,
    timeout_s: float = 60.0,
    while_running: Callable[[Sequence[int]], None] | None = None,
) -> list[Outcome]:
    """Like run_ranks, but give back how each rank ended. `while_running(pids)` runs in the parent meanwhile."""
    started = time.monotonic()
    pids, pipes, starters = [], [], []
    for rank in range(num_ranks):
        read_end, write_end = os.pipe()
        start_read, start_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            os.close(start_write)
            _child(rank, num_ranks, int.from_bytes(os.read(start_read, 8), "little"), fn, write_end)
        os.close(write_end)
        os.close(start_read)
        pids.append(pid)
        pipes.append(read_end)
        starters.append(start_write)
    # Only now: a fork while the store's thread resolves a name would leave the child with libc's resolver locked.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    for starter in starters:
        os.write(starter, store.port.to_bytes(8, "little"))
        os.close(starter)
    try:
        if while_running is not None:
            while_running(pids)
        return _collect(pids, pipes, started, timeout_s)
    finally:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass
        for pipe in pipes:
            os.close(pipe)


@contextmanager
def rank_environment(rank: int, num_ranks: int, port: int):
    """torchrun's variables for one rank, with the store hosted by the parent."""
    wanted = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _child(rank: int, num_ranks: int, port: int, fn: Callable[[int], Any], pipe: int) -> None:
    status = 1
    try:
        die_with_parent()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with rank_environment(rank, num_ranks, port):
            try:
                message = ("value", fn(rank), "")
                status = 0
            except BaseException as e:
                message = ("error", e, traceback.format_exc())
        try:
            data = pickle.dumps(message)
        except Exception as e:
            data = pickle.dumps(("error", RuntimeError(f"{message[1]!r} cannot be pickled: {e}"), message[2]))
        with os.fdopen(pipe, "wb") as out:
            out.write(data)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _collect(pids: list[int], pipes: list[int], started: float, timeout_s: float) -> list[Outcome]:
    chunks: dict[int, list[bytes]] = {p: [] for p in pipes}
    ended: dict[int, float] = {}
    while len(ended) < len(pipes):
        left = started + timeout_s - time.monotonic()
        ready = select.select([p for p in pipes if p not in ended], [], [], max(left, 0))[0]
        if not ready:
            waiting = [r for r, p in enumerate(pipes) if p not in ended]
            raise AssertionError(f"ranks {waiting} of {len(pipes)} still ran after {timeout_s} s")
        for pipe in ready:
            data = os.read(pipe, 1 << 20)
            if data:
                chunks[pipe].append(data)
            else:
                ended[pipe] = time.monotonic() - started
    outcomes = []
    for rank, (pid, pipe) in enumerate(zip(pids, pipes, strict=True)):
        _, status = os.waitpid(pid, 0)
        data = b"".join(chunks[pipe])
        if not data:
            killed_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            error = None if killed_by else RuntimeError(f"rank {rank} exited with {status} and no answer")
            outcomes.append(Outcome(rank, signal=killed_by, error=error, elapsed_s=ended[pipe]))
            continue
        kind, payload, trace = pickle.loads(data)
        if kind == "value":
            outcomes.append(Outcome(rank, value=payload, elapsed_s=ended[pipe]))
        else:
            outcomes.append(Outcome(rank, error=payload, trace=trace, elapsed_s=ended[pipe]))
    return outcomes
