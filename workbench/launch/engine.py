"""What a rank of a cluster runs: an ipyparallel engine whose id is its world rank, and what the driver asks of it."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from ipykernel.iostream import OutStream
from ipyparallel.engine.app import IPEngine
from IPython import get_ipython

from workbench.errors import ArgumentError, ClosedError, WorkbenchError
from workbench.launch.calls import CallRecorder
from workbench.launch.gpu_waits import abort_nccl, end_waits_on_interrupt
from workbench.launch.orphans import die_with_parent
from workbench.launch.rank_kernel import use_rank_kernel
from workbench.launch.spec import EngineSpec
from workbench.launch.waits import poll_waits
from workbench.ranks import GroupMap
from workbench.runtime import Session
from workbench.runtime.devices import choose_device, take_gpu
from workbench.runtime.members import gather_over_store
from workbench.runtime.process_group import default_store, init_default_group, start_generation
from workbench.trace import Recorder

_TRACE_BYTES = 2 << 20  # the last ten thousand calls
_FLUSH_S = 0.02  # how long printed text may wait for more; ipykernel's own 0.2 s is felt in a notebook


class Rank:
    """One rank: its device, its recorder, its Session if the cluster has a group map, and the names a cell sees."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self.world_rank = int(os.environ["RANK"])
        self.device = choose_device(spec.device, int(os.environ["LOCAL_WORLD_SIZE"]))
        self.group_map = GroupMap.from_json(spec.group_map) if spec.group_map is not None else None
        recorder = Recorder.open(
            Path(spec.directory) / "trace", self.world_rank, attempt=spec.attempt, size_bytes=_TRACE_BYTES
        )
        self._calls = CallRecorder(recorder, self.group_map, timeout_s=spec.timeout_s)
        poll_waits(spec.timeout_s)
        self._calls.install()
        gpu = torch.device("cpu")
        if self.device == "cuda":
            gpu = torch.device("cuda", take_gpu())
            end_waits_on_interrupt(self._leave_gpu_waits)
        self._session: Session | None = None
        self._given: dict[str, Any] = {
            "rank": self.world_rank,
            "world_size": int(os.environ["WORLD_SIZE"]),
            "device": gpu,
            "torch": torch,
            "dist": dist,
            "group_map": self.group_map,
        }
        self.names = dict(self._given)

    def begin(self, generation: int) -> tuple[int, str]:
        """Leave the groups there are, and make those of a new generation; gives pid and device.

        Collective: every rank of the cluster, none of them in another call.
        """
        get_ipython().ask_exit = _refuse_exit  # behind exit and quit
        start_generation(generation)
        self._calls.start_generation(generation)
        init_default_group(self.device, self._spec.timeout_s)
        for name, value in self._given.items():
            self.names.setdefault(name, value)  # what %reset or del has taken away
        if self.group_map is not None:
            self._renew_session(self.group_map)
        return os.getpid(), self.device

    def _renew_session(self, group_map: GroupMap) -> None:
        """Rebuild the session, or open another one on every rank if a cell has closed it on some rank. Collective."""
        session = self._session
        usable = gather_over_store(
            default_store(),
            "workbench/session",
            world_rank=self.world_rank,
            world_size=self._given["world_size"],
            value=session is not None and _is_open(session),
            timeout_s=self._spec.timeout_s,
            what="making the session anew",
        )
        if session is not None and all(usable):
            session.rebuild()
            self.names.setdefault("session", session)
            return
        self.end()
        self._session = self.names["session"] = Session(
            group_map,
            device=self.device,
            timeout_s=self._spec.timeout_s,
            trace_dir=str(Path(self._spec.directory) / "session"),
        )

    def _leave_gpu_waits(self) -> None:
        """Called in a thread while the main thread hangs: its collectives end, and their groups are lost."""
        self._calls.lose_gpu_groups()
        abort_nccl()

    def end(self) -> None:
        """Close what holds memory of others. Local: nobody is waited for."""
        if self._session is not None:
            self._session.__exit__(None, RuntimeError("the cluster is closing"), None)


_rank: Rank | None = None


def run_rank(spec: EngineSpec) -> None:
    """Be a rank until told to end. Called by torchrun's agent in a forked child, its environment set."""
    global _rank
    die_with_parent()
    os.setpgid(0, 0)  # a cell that signals its process group means its rank, not the agent and the other ranks
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    np.random.seed()  # forked ranks would all draw the agent's numbers
    world_rank = int(os.environ["RANK"])
    _register_stack_dump(spec.stacks_file(world_rank))
    warnings.filterwarnings("ignore", message="To exit: use")  # IPython's advice after sys.exit(): no rank can take it
    OutStream.flush_interval = _FLUSH_S
    use_rank_kernel()
    _rank = Rank(spec)
    sys.argv = ["workbench-rank"]
    _Engine.launch_instance(
        [
            f"--IPEngine.id={world_rank}",
            f"--IPEngine.url_file={spec.connection_file}",
            f"--IPEngine.enable_nanny={spec.nanny}",
            "--IPEngine.max_heartbeat_misses=0",  # it ends with its agent, and the agent with its owner
            *(
                "--InteractiveShell.xmode=Plain",
                "--InteractiveShell.colors=nocolor",
            ),  # the others take a second to draw
            f"--profile-dir={Path(spec.connection_file).parent.parent}",
        ],
        user_ns=_rank.names,
    )


def this_rank() -> Rank:
    """The rank that this process is."""
    assert _rank is not None
    return _rank


class _Engine(IPEngine):  # type: ignore[misc]  # ipyparallel is untyped
    """An engine that SIGTERM ends at once, wherever it stands: its peers must not wait for a rank that is to go."""

    name = "ipengine"

    def init_signal(self) -> None:
        super().init_signal()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _is_open(session: Session) -> bool:
    try:
        session.check()
    except ClosedError:
        return False
    except WorkbenchError:  # what a kernel reported: a rebuild is the answer to it
        return True
    return True


def _refuse_exit() -> NoReturn:
    raise ArgumentError(
        "exit ends a process, and when one rank ends, all do: nothing was ended; to leave a cell early, raise; to end "
        "the ranks, call cluster.close() where the cluster was started"
    )


def _register_stack_dump(path: Path) -> None:
    """On SIGUSR1, a fault and an abort append stacks to `path`: works inside C++ and with the GIL taken."""
    file = path.open("w")
    file.write(f"main {threading.main_thread().ident:#018x}\n")
    file.flush()
    faulthandler.enable(file=file, all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=False)
    _kept_open.append(file)


_kept_open: list[Any] = []
