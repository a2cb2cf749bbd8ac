"""ipyparallel's controller, private and tied to its owner:
`python -m workbench.launch.controller DIRECTORY OWNER [--keep]`.

All its files are readable by this user alone. OWNER is the mark of the process that it must not outlive; with --keep it
may, once the cluster has come up: nobody could find one whose start was broken off. It clears the whole directory away
when it ends, unless its owner lives: that one reads the log first. A kept cluster that has come up has no owner.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from pathlib import Path

from ipyparallel.controller.app import IPController
from traitlets.config import Config

from workbench.launch.directory import CLUSTER_ID, has_record
from workbench.launch.open_files import take_open_files
from workbench.launch.orphans import die_with_parent, end_with
from workbench.launch.packing import pack
from workbench.launch.ports import reserve_ports
from workbench.launch.survivors import mark_lives

_PORTS = 18  # as many as ipyparallel 9 takes


def main() -> None:
    """Serve until SIGTERM."""
    directory, owner, *options = sys.argv[1:]
    os.umask(0o077)
    take_open_files()
    kept = "--keep" in options
    end_with(owner, unless=lambda: kept and has_record(Path(directory)))
    os.register_at_fork(after_in_child=die_with_parent)  # the heart monitor is a forked child
    ports = reserve_ports(_PORTS)
    try:
        IPController.launch_instance(
            [
                f"--profile-dir={directory}/profile",
                f"--cluster-id={CLUSTER_ID}",
                *("--ip=127.0.0.1", "--location=127.0.0.1"),
                # Who does not hold the key in the connection files is turned away before a queue hears of it.
                # Signatures are read behind the queues, and one frame of a stranger has a queue lose the next cell.
                "--IPController.enable_curve=True",
                "--usethreads",
                f"--Session.packer={pack.__module__}.{pack.__name__}",  # told to engines and clients in their files
                # An engine is registered at its first heartbeat. Whether it lives is for the Cluster to say, by its
                # process: a machine that is merely busy must not lose its ranks.
                *("--HeartMonitor.period=500", "--HeartMonitor.max_heartmonitor_misses=1000000000"),
            ],
            config=Config(
                Session={"key": secrets.token_hex(32).encode()},  # else it takes encryption for enough
                IPController={"ports": [held.getsockname()[1] for held in ports]},
            ),
        )
    finally:
        if not mark_lives(owner) or (kept and has_record(Path(directory))):
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
