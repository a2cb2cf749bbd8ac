"""Groups of forked ranks over shared memory, what the test and they tell each other meanwhile, and what they hold."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends.ranks import channels, request, run_outcomes
from tests.forked import Outcome
from workbench.backends import shm
from workbench.errors import ClosedError

HIDDEN = 7168


class Board:
    """A few numbers that forked ranks and the test share."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4096)

    def __setitem__(self, place: int, value: float) -> None:
        self._memory[8 * place : 8 * place + 8] = struct.pack("d", value)

    def __getitem__(self, place: int) -> float:
        return float(struct.unpack("d", self._memory[8 * place : 8 * place + 8])[0])

    def wait_for(self, place: int, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not self[place]:
            assert time.monotonic() < deadline, f"place {place} was never set"
            time.sleep(0.005)


def wait_until_asleep(pid: int, thread: int | None = None, timeout_s: float = 30.0) -> None:
    """Until that thread sleeps in ten looks one after the other: a rank that only waits for a processor does not."""
    deadline, asleep = time.monotonic() + timeout_s, 0
    while asleep < 10:
        assert time.monotonic() < deadline, f"process {pid} never slept"
        state = Path(f"/proc/{pid}/task/{thread or pid}/stat").read_text().rpartition(")")[2].split()[0]
        asleep = asleep + 1 if state == "S" else 0
        time.sleep(0.02)


def outcomes_of(
    num_ranks: int,
    work: Callable[[Any, int], Any],
    *,
    timeout_s: float = 30.0,
    while_running: Callable[[Sequence[int]], None] = lambda _pids: None,
) -> list[Outcome]:
    """Run work(workspace, rank) on one group of num_ranks; how each rank ended."""

    def rank_main(rank: int) -> Any:
        with channels(tuple(range(num_ranks)), timeout_s=timeout_s) as [channel]:
            workspace = shm.bind(channel, request(HIDDEN))
            return work(workspace, rank)

    return run_outcomes(num_ranks, rank_main, while_running=while_running)


def ones(tokens: int = 1) -> torch.Tensor:
    return torch.ones(tokens, HIDDEN, dtype=torch.bfloat16)


def then_closed(workspace: Any) -> str:
    """The text of the ClosedError that any later call gives."""
    with pytest.raises(ClosedError) as caught:
        workspace.all_reduce(ones())
    with pytest.raises(ClosedError):
        workspace.empty((1, HIDDEN), torch.bfloat16)
    assert workspace.broken == str(caught.value)
    return str(caught.value)


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/dev/shm/wbk-")


def open_files() -> int:
    """Descriptors of segments and of watched processes; gloo opens and closes its own meanwhile."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum("wbk-" in link or "pidfd" in link for link in links)


def named_segments() -> list[str]:
    """Segments of this process that still have a name."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"wbk-{os.getpid()}-")]
