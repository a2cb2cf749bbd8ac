"""Pins that an interrupt ends a wait in C++ which answers no signal, as CUDA's are: here, on CPU, a locked mutex.

Ending the wait is unlocking it, in the place of NCCL's abort. tests/launch/test_cuda_waits.py does the same on GPUs.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch import bodies
from tests.launch.conftest import measured
from workbench import Cluster
from workbench.launch import CellDeadlineError, RanksFailedError

ROOT = Path(__file__).parent.parent.parent

# A wait that ignores EINTR and lets other threads run, and what ends it.
MUTEX = """
import ctypes
pthread = ctypes.CDLL(None)
mutex = ctypes.create_string_buffer(64)
pthread.pthread_mutex_lock(mutex)
def unlock():
    ended.append("ended")
    pthread.pthread_mutex_unlock(mutex)
ended = []
"""
PROGRAM = f"""
import signal, sys, time
from workbench.launch.gpu_waits import end_waits_on_interrupt
{MUTEX}
end_waits_on_interrupt(unlock)
print("ready", flush=True)
try:
    {{wait}}
    print("no interrupt", flush=True)
except KeyboardInterrupt:
    print("interrupted", len(ended), flush=True)
"""


def interrupt(wait: str) -> tuple[str, float]:
    """What the program says when it is interrupted half a second into `wait`, and how long that took."""
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(wait=wait)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert program.stdout is not None
    try:
        assert program.stdout.readline() == "ready\n"
        time.sleep(0.5)
        started = time.monotonic()
        program.send_signal(signal.SIGINT)
        told, _ = program.communicate(timeout=30)
        return told.strip(), time.monotonic() - started
    finally:
        program.kill()
        program.wait()


def test_a_wait_in_c_is_ended_and_the_interrupt_raised_there() -> None:
    told, seconds = interrupt("pthread.pthread_mutex_lock(mutex)")
    assert told == "interrupted 1"
    assert measured("interrupt of a wait in C", seconds) < 10


@pytest.mark.parametrize("wait", ["time.sleep(60)", "while True: time.monotonic()"])
def test_what_answers_an_interrupt_by_itself_has_nothing_ended(wait: str) -> None:
    """The program outlives the moment in which the thread looks again."""
    told, _ = interrupt(f"try:\n        {wait}\n    finally:\n        time.sleep(1)")
    assert told == "interrupted 0"


def test_an_interrupt_of_a_forked_child_is_not_one_of_its_parent() -> None:
    code = f"""
import os, signal, time
from workbench.launch.gpu_waits import end_waits_on_interrupt
{MUTEX}
end_waits_on_interrupt(unlock)
child = os.fork()
if child == 0:
    try:
        time.sleep(60)
    finally:
        os._exit(0)
time.sleep(0.3)
os.kill(child, signal.SIGINT)
os.waitpid(child, 0)
pthread.usleep(900_000)
print(len(ended))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True
    )
    assert done.stdout == "0\n"


def test_a_rank_of_a_cluster_comes_back_from_a_wait_in_c(cluster: Cluster) -> None:
    """ipykernel sets its own handler around each cell; the thread hears of the signal all the same."""
    pids = cluster.run(bodies.pid)
    start = "from workbench.launch.gpu_waits import end_waits_on_interrupt\nend_waits_on_interrupt(unlock)"
    cluster.run(f"{MUTEX}\n{start}", ranks=1)
    with pytest.raises(CellDeadlineError):
        cluster.run("import time; time.sleep(60)", ranks=1, deadline_s=0.3)
    assert cluster.interrupt(wait_s=20) == ()
    cluster.run("time.sleep(1); assert ended == []", ranks=1)
    with pytest.raises(CellDeadlineError):
        cluster.run("pthread.pthread_mutex_lock(mutex)", ranks=1, deadline_s=0.3)
    started = time.monotonic()
    assert cluster.interrupt(wait_s=20) == ()
    measured("interrupt of a rank that waits in C", time.monotonic() - started)
    cluster.run("assert ended == ['ended']\nimport signal\nsignal.set_wakeup_fd(-1)", ranks=1)
    assert cluster.run(bodies.pid) == pids


def test_who_never_comes_to_the_first_call_of_a_pair_is_named_and_may_come_later(cluster: Cluster) -> None:
    """What a first call on CUDA tensors waits for before NCCL does; a rank that gave up is no longer expected."""
    come = """
    from workbench.launch.waits import arrive
    from workbench.runtime.process_group import default_store
    arrive(default_store(), "pair", (0, 1), rank, {timeout_s}, what="send #1")
    """
    with pytest.raises(RanksFailedError, match=r"send #1: world rank 0 waited 0\.3 s for world rank 1, which did not"):
        cluster.run(come.format(timeout_s=0.3), ranks=0)
    with pytest.raises(RanksFailedError, match=r"send #1: world rank 1 waited 0\.3 s for world rank 0, which did not"):
        cluster.run(come.format(timeout_s=0.3), ranks=1)
    cluster.run(come.format(timeout_s=20), ranks="0,1")
