"""`workbench lab` as a user starts it: a process of its own, with empty settings, ended by Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

SETTINGS = {
    # all cells in the page at once, so that the test sees each of them
    "notebook-extension/tracker.jupyterlab-settings": '{"windowingMode": "none"}',
}


@contextmanager
def serve(directory: Path, private: Path, *, dark: bool = False) -> Iterator[str]:
    """`workbench lab` on `directory`, with empty settings of its own under `private`; gives the address with token."""
    settings = private / "settings" / "@jupyterlab"
    chosen = dict(SETTINGS)
    if dark:
        chosen["apputils-extension/themes.jupyterlab-settings"] = '{"theme": "JupyterLab Dark"}'
    for name, text in chosen.items():
        (settings / name).parent.mkdir(parents=True, exist_ok=True)
        (settings / name).write_text(text)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "WORKBENCH_DEVICE": "cpu",
        "JUPYTER_CONFIG_DIR": str(private / "config"),
        "JUPYTER_RUNTIME_DIR": str(private / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(private / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(private / "workspaces"),
    }
    log = private / "lab.log"
    command = [sys.executable, "-m", "workbench", "lab", "--no-browser", "--port", "0", "--dir", str(directory)]
    with log.open("w") as file:
        process = subprocess.Popen(command, stderr=file, stdout=file, env=environment, cwd=private)
    try:
        yield _await_address(process, log)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        finally:
            process.kill()
    assert process.returncode == 130, log.read_text()


def _await_address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = re.search(r"http://127\.0\.0\.1:\d+/lab\S*\?token=[0-9a-f]{48}", log.read_text())
        if found:
            return found[0]
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    raise TimeoutError(f"no address within 60 s: {log.read_text()}")
