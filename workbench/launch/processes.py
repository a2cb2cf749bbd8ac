"""The processes of a cluster as its driver sees them: a controller, an agent, and the agent's ranks.

The controller must not outlive the driver (unless the cluster is kept), the agent not the controller, the ranks not the
agent: each watches the one before it, so nothing is left whatever ends first and however.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

import workbench
from workbench.launch.interrupts import interrupts_later
from workbench.launch.job import RankFailure
from workbench.launch.multicast import multicast_switches
from workbench.launch.spec import EngineSpec
from workbench.launch.survivors import MARK, mark_lives, mark_pid, run_tag, stop_marked

_STOP_S = 2.0
_DEATH_S = 5.0
_started: list[subprocess.Popen[bytes]] = []  # of all clusters: one may be let go while its agent, our child, goes on


class Processes:
    """Controller and agent of the cluster in `directory`. `keep`: they may outlive this process."""

    def __init__(self, directory: Path, *, keep: bool, controller: str = "") -> None:
        self.directory = directory
        self.keep = keep
        self.controller = controller
        self.agent = ""
        self._pid = os.getpid()
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start_controller(self) -> None:
        """Start ipyparallel's controller. Local; does not wait for it."""
        owner = run_tag()
        module = "workbench.launch.controller"
        command = [sys.executable, "-P", "-m", module, str(self.directory), owner, *(["--keep"] if self.keep else [])]
        self.controller = self._spawn(command, {MARK: "" if self.keep else owner}, "controller.log")

    def start_agent(self, spec: EngineSpec) -> None:
        """Start torchrun's agent with the ranks of `spec`. Local; does not wait for them."""
        environment = rank_environment(spec.ranks, self.controller)
        self.agent = self._spawn(agent_command(spec.save()), environment, f"agent-{spec.attempt}.log")

    def can_register(self) -> bool:
        """Whether the controller can take up ranks: it runs, and so does the monitor that it forked."""
        if not mark_lives(self.controller):
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            forked = psutil.Process(mark_pid(self.controller)).children()
            return all(child.status() != psutil.STATUS_ZOMBIE for child in forked)
        return False

    def stop_agent(self, rank_marks: Sequence[str]) -> None:
        """End the agent and all ranks: politely, and after two seconds for certain; with them what they started."""
        ranks = set(rank_pids(mark_pid(self.agent))) if mark_lives(self.agent) else set()
        ranks |= {mark_pid(m) for m in rank_marks if mark_lives(m)}
        family = [p for p in map(_process, ranks) if p is not None]
        _signal(self.agent, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        while time.monotonic() < deadline and (mark_lives(self.agent) or any(p.is_running() for p in family)):
            self._reap()
            time.sleep(0.02)
        _signal(self.agent, signal.SIGKILL)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=_STOP_S)
        stop_marked(self.controller)
        self._reap()

    def stop(self, rank_marks: Sequence[str]) -> None:
        """End everything and clear the directory away. Local; does nothing in a forked child of the driver."""
        if os.getpid() != self._pid:
            return
        self.stop_agent(rank_marks)
        _signal(self.controller, signal.SIGKILL)  # it holds nothing that is worth the second a clean end takes it
        for child in self._children.values():
            child.kill()  # one that an interrupted start did not come to name is among them
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_STOP_S)
        shutil.rmtree(self.directory, ignore_errors=True)

    def log_tail(self, name: str, lines: int = 15) -> str:
        """The end of a process's log; the log's name if there is none."""
        with contextlib.suppress(OSError):
            return "\n".join((self.directory / name).read_text(errors="replace").splitlines()[-lines:])
        return f"no {name}"

    def first_failure(self, spec: EngineSpec) -> RankFailure | None:
        """The rank of `spec` that failed first, once torchrun's agent has told; None before, and if none failed."""
        try:
            return RankFailure(**json.loads(spec.failure_file.read_text()))
        except FileNotFoundError:
            return None

    def await_failure(self, spec: EngineSpec) -> RankFailure | None:
        """The first failure after a rank's end: torchrun takes a moment to tell, and says nothing of status 0."""
        deadline = time.monotonic() + _DEATH_S
        while (failure := self.first_failure(spec)) is None and mark_lives(self.agent) and time.monotonic() < deadline:
            time.sleep(0.01)
        return failure

    def why_ended(self, spec: EngineSpec) -> str:
        """The first failure in words, and in its traceback or else the end of the agent's log."""
        failure = self.first_failure(spec)
        if failure is None:
            return self.log_tail(f"agent-{spec.attempt}.log")
        story = failure.traceback or self.log_tail(f"agent-{spec.attempt}.log")
        return f"world rank {failure.world_rank}: {failure.message}\n{story}".rstrip()

    def _spawn(self, command: Sequence[str], environment: Mapping[str, str], log: str) -> str:
        fd = os.open(self.directory / log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(fd, "ab") as output, interrupts_later():  # a child nobody knows would live as long as this process
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_import_path(), "IPYTHONDIR": str(self.directory / "ipython"), **environment},
                start_new_session=True,  # Ctrl-C in a terminal reaches the driver alone
            )
            mark = run_tag(child.pid)
            self._children[mark] = child
            _started.append(child)
        return mark

    def _reap(self) -> None:
        _started[:] = [child for child in _started if child.poll() is None]


def agent_command(spec_file: Path) -> list[str]:
    """The command of a cluster's torchrun agent. -P: a queue.py beside the notebook is not the library's."""
    return [sys.executable, "-P", "-m", "workbench.launch.rank_agent", str(spec_file)]


def rank_environment(ranks: int, mark: str) -> dict[str, str]:
    """What the agent's environment needs beyond the driver's: one host's network, a share of its cores, our mark."""
    return {
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks))),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # the agent counts GPUs without touching CUDA, or its children could not
        MARK: mark,
        **multicast_switches(os.environ),
    }


def rank_pids(agent_pid: int) -> list[int]:
    """The agent's rank processes, by pid; none if it is gone."""
    try:
        return [child.pid for child in psutil.Process(agent_pid).children()]
    except psutil.NoSuchProcess:
        return []


def _import_path() -> dict[str, str]:
    """PYTHONPATH for children, where this package is not installed but found beside the program."""
    root = str(Path(workbench.__file__).parent.parent)
    if root.endswith("site-packages"):
        return {}
    return {"PYTHONPATH": os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)}


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _signal(mark: str, number: int) -> None:
    if mark_lives(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(mark_pid(mark), number)
