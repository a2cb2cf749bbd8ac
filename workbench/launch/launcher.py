"""torchrun as an engine launcher of ipyparallel: `ipyparallel.Cluster(engines="torchrun", n=4)`.

For those who work with ipyparallel's own Cluster, its command `ipcluster`, or its JupyterLab panel. workbench.Cluster
starts the same agent without ipyparallel's asynchronous machinery, and adds what a notebook needs.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from ipyparallel.cluster.launcher import EngineLauncher, LocalProcessLauncher

from workbench.launch.processes import agent_command, rank_environment, rank_pids
from workbench.launch.spec import EngineSpec
from workbench.launch.survivors import run_tag


class TorchrunEngineSetLauncher(LocalProcessLauncher, EngineLauncher):  # type: ignore[misc]  # ipyparallel is untyped
    """One torchrun agent with `n` engines on this host. Engine id = world rank."""

    def find_args(self) -> list[str]:
        """The agent's command. Writes what the ranks are told beside ipyparallel's own files."""
        return agent_command(self._spec_file())

    def get_env(self) -> dict[str, str]:
        return {**super().get_env(), **rank_environment(self.n, run_tag())}

    def start(self, n: int) -> Any:
        self.n = n
        return super().start()

    def signal(self, sig: int) -> None:
        """Interrupts go to the ranks: the agent takes one for its own end and kills them all 30 s later."""
        if sig not in (signal.SIGINT, signal.SIGUSR1):
            super().signal(sig)
        elif self.state == "running":
            for pid in rank_pids(self.process.pid):
                os.kill(pid, sig)

    def _spec_file(self) -> Path:
        directory = Path(self.profile_dir) / "torchrun" / (self.engine_set_id or "engines")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return EngineSpec(
            ranks=self.n,
            connection_file=self.connection_files["engine"],
            directory=str(directory),
            owner=run_tag() if getattr(self.parent, "shutdown_atexit", True) else "",
            nanny=True,
        ).save()
