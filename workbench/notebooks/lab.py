"""JupyterLab on the notebooks: on the loopback interface, behind a token, ended by one Ctrl-C."""

from __future__ import annotations

import os
import secrets
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.errors import ArgumentError
from workbench.notebooks.places import checkout_notebooks, copy_notebooks, notebooks_in

HOST = "127.0.0.1"
DEFAULT_DIRECTORY = "workbench-notebooks"
FIRST = "00_start_here.ipynb"


def choose_directory(wanted: Path | None, *, say: Callable[[str], None]) -> Path:
    """The directory to open, with the notebooks in it: unless another is wanted, that of the checkout, be it the one
    this package runs from or the working directory.

    Notebooks are copied to another one if they are not there yet; a file that is there is never written over.
    Raises: ResourceError if the installation holds no notebooks; ArgumentError if the directory cannot be used.
    """
    checkout = checkout_notebooks() or notebooks_in(Path.cwd())
    if wanted is None and checkout is not None:
        return checkout
    directory = (wanted or Path(DEFAULT_DIRECTORY)).resolve()
    try:
        copied = copy_notebooks(directory)
    except OSError as e:
        raise ArgumentError(f"{directory} cannot be used: {e.strerror}; choose another with --dir") from e
    if copied.written:
        say(f"copied {len(copied.written)} notebooks to {directory}")
    if copied.kept:
        say(f"left as they are, since they differ from the shipped ones: {', '.join(copied.kept)}")
    return directory


def run_lab(directory: Path, *, port: int | None, browser: bool, say: Callable[[str], None]) -> None:
    """Serve JupyterLab on `directory` until Ctrl-C, SIGTERM or File > Shut Down; kernels and their ranks end with it.

    port: that one or none; by default 8888 or the next free one.   browser: whether to open one.
    What a user's Jupyter configuration says about address and token is overruled: loopback, and a new token each time.
    Raises: ArgumentError if the port is taken; KeyboardInterrupt or SystemExit(143) once a signal has ended it.
    """
    if port is not None:
        _check_port(port)
    from jupyterlab.labapp import LabApp

    first = f"/tree/{FIRST}" if (directory / FIRST).exists() else ""
    token = secrets.token_hex(24)
    server = LabApp.initialize_server(
        [
            f"--ServerApp.ip={HOST}",
            "--ServerApp.allow_remote_access=False",
            f"--IdentityProvider.token={token}",  # an argument of this call, in no process list
            f"--ServerApp.root_dir={directory}",
            f"--ServerApp.open_browser={browser}",
            f"--ServerApp.allow_root={os.geteuid() == 0}",  # containers; the user is root already
            *([] if port is None else [f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]),
            "--KernelManager.transport_encryption=auto",  # other users of this machine do not read along
            f"--LabApp.default_url=/lab{first}",
            "--Application.log_level=WARN",
        ]
    )
    server.web_app.settings["page_config_hook"] = _without_news
    ended_by: list[int] = []

    def end(number: int, _: object) -> None:
        ended_by.append(number)
        server.stop(from_signal=True)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    say(f"JupyterLab on {directory}: http://{HOST}:{server.port}/lab{first}?token={token}")
    say("Ctrl-C ends it, with its kernels and their ranks")
    server.start()
    if ended_by:
        raise KeyboardInterrupt if ended_by[0] == signal.SIGINT else SystemExit(143)


def _without_news(_: Any, page: dict[str, Any]) -> dict[str, Any]:
    """No pop-up that asks about news, and no look-up of updates, whatever the user's settings say for other servers."""
    page["disabledExtensions"] = [*page.get("disabledExtensions", ()), "@jupyterlab/apputils-extension:announcements"]
    return page


def _check_port(port: int) -> None:
    if port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as e:
            raise ArgumentError(f"port {port} cannot be used ({e.strerror}); choose another or leave --port out") from e
