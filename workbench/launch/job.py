"""One job under torchrun: start it, pass its output on, stop all of it whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from workbench.launch.multicast import multicast_switches
from workbench.launch.survivors import MARK, run_tag

PROGRESS = "@progress "
"""What a rank's line begins with that the user should see while the job runs."""

_STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The first rank that failed, as torchrun saw it: the cause, where the others are mostly its echoes."""

    world_rank: int
    message: str
    traceback: str


@dataclass(frozen=True, slots=True)
class JobResult:
    """How the job ended: the agent's exit status, whether the deadline ended it, and the first failure."""

    status: int
    timed_out: bool
    failure: RankFailure | None


def run_job(
    command: Sequence[str],
    *,
    ranks: int,
    log_dir: Path,
    timeout_s: float,
    environment: Mapping[str, str],
    on_progress: Callable[[str], None],
) -> JobResult:
    """Run `command` (a module with its arguments) on `ranks` local ranks under torchrun and wait for the end.

    Ranks meet on the loopback interface. Past `timeout_s`, on Ctrl-C and on any other exception all processes of the
    job are ended before this returns or raises. What ranks print goes to `log_dir`/output.log; lines that begin with
    PROGRESS go to `on_progress` as well, without it.
    """
    failure_file = log_dir / "failure.json"
    log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    agent_command = [
        sys.executable,
        *("-m", "workbench.launch.agent", str(failure_file)),
        *("--nnodes", "1", "--nproc-per-node", str(ranks)),
        *("--rdzv-backend", "loopback", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
        *("--max-restarts", "0", "--monitor-interval", "0.1", "--log-dir", str(log_dir)),
        *("-m", *command),
    ]
    agent = subprocess.Popen(
        agent_command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_job_environment(environment, ranks),
        start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the job in order
    )
    reader = threading.Thread(target=_pass_on, args=(agent.stdout, log_dir / "output.log", on_progress), daemon=True)
    with _ended(agent):
        reader.start()
        try:
            status = agent.wait(timeout=timeout_s)
            timed_out = False
        except subprocess.TimeoutExpired:
            status, timed_out = -1, True
    reader.join(_STOP_S)
    return JobResult(status, timed_out, None if status == 0 else _read_failure(failure_file))


def _pass_on(stream: IO[bytes], log: Path, on_progress: Callable[[str], None]) -> None:
    """Copy the job's output to the log as it comes."""
    with stream, log.open("wb", buffering=0) as file:
        for line in stream:
            file.write(line)
            text = line.decode(errors="replace").rstrip()
            if text.startswith(PROGRESS):
                on_progress(text.removeprefix(PROGRESS))


@contextlib.contextmanager
def _ended(agent: subprocess.Popen[bytes]) -> Iterator[None]:
    """End the agent and every descendant on the way out: politely first, then for certain."""
    try:
        yield
    finally:
        family = _family(agent.pid)
        if agent.poll() is None:
            agent.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + _STOP_S
            while agent.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
        family |= _family(agent.pid)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        agent.wait()
        psutil.wait_procs(family, timeout=_STOP_S)


def _family(pid: int) -> set[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return {process, *process.children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def _job_environment(extra: Mapping[str, str], ranks: int) -> dict[str, str]:
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "0")
    environment[MARK] = run_tag()
    environment.update(multicast_switches(environment))
    environment.update(extra)
    return environment


def _read_failure(path: Path) -> RankFailure | None:
    try:
        return RankFailure(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None  # the agent itself was ended
