"""torchrun's agent for the ranks of a cluster: `python -m workbench.launch.rank_agent ENGINES.json`.

It is torch's elastic agent, the same that the command `torchrun` runs, asked to start a function in forked processes
and not a command: torch and ipyparallel are loaded once, here, and not once a rank, which on a small machine is most of
the time a start takes. The agent itself never touches CUDA, so its children may. What forked ranks share and others
would not: the seed of Python's string hashes, so sets of strings iterate alike on every rank.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from workbench.launch import loopback
from workbench.launch.agent import first_failure, log_plainly
from workbench.launch.engine import run_rank
from workbench.launch.open_files import take_open_files
from workbench.launch.orphans import end_with
from workbench.launch.spec import EngineSpec, write_private
from workbench.launch.survivors import stop_marked

_MOST_WAIT_S = 60.0


def main() -> int:
    """Start the ranks and wait for their end; 1 if one failed, which is then told in the spec's failure file."""
    os.umask(0o077)
    take_open_files()
    spec = EngineSpec.load(sys.argv[1])
    if spec.owner:
        end_with(spec.owner, before_kill=lambda: stop_marked(spec.mark))
    log_plainly()
    loopback.register()
    _await_connection_file(Path(spec.connection_file))
    status = _serve(spec)
    sys.stdout.flush()
    stop_marked(spec.mark)  # what the ranks started
    return status


def _serve(spec: EngineSpec) -> int:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=spec.ranks,
        run_id="workbench",
        rdzv_backend=loopback.BACKEND,
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=str(Path(spec.directory) / "log")),
    )
    try:
        elastic_launch(config, run_rank)(spec)
    except ChildFailedError as e:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it comes once the owner has read this; the end is near
        if Path(spec.directory).is_dir():  # its owner may have cleared it away by now
            write_private(spec.failure_file, json.dumps(first_failure(e)))
        return 1
    except SignalException as e:  # asked to end, and the ranks have ended with it
        return 128 + int(e.sigval)
    return 0


def _await_connection_file(path: Path) -> None:
    """Return once the controller has written all of it."""
    deadline = time.monotonic() + _MOST_WAIT_S
    while time.monotonic() < deadline:
        try:
            json.loads(path.read_text())
            return
        except (FileNotFoundError, ValueError):
            time.sleep(0.02)
    raise TimeoutError(f"no connection file {path} after {_MOST_WAIT_S:g} s; the controller's log is beside it")


if __name__ == "__main__":
    os._exit(main())  # the ranks are gone, and unloading torch takes longer than a restart should
