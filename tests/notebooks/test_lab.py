"""Pins `workbench lab` as a server: loopback alone, a token always, the notebooks in it, one Ctrl-C ends it."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.notebooks.serving import ROOT, serve
from workbench.notebooks import choose_directory, find_notebooks, lab


def test_lab_asks_for_its_token_and_listens_on_loopback_alone(tmp_path: Path) -> None:
    with serve(tmp_path / "notebooks", tmp_path) as address:
        base, _, token = address.partition("?token=")
        root = base.partition("/lab")[0]
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"{root}/api/contents", timeout=10)
        with urllib.request.urlopen(f"{root}/api/contents?token={token}", timeout=10) as answer:
            assert b"00_start_here.ipynb" in answer.read()
        port = int(root.rpartition(":")[2])
        assert _listening(port) == {"0100007F"}


def _listening(port: int) -> set[str]:
    """The local addresses, as the kernel writes them, on which somebody listens at this port."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            address, state = line.split()[1], line.split()[3]
            host, _, number = address.rpartition(":")
            if int(number, 16) == port and state == "0A":
                found.add(host)
    return found


def test_a_port_that_is_taken_is_one_message_and_exit_2(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "workbench", "lab", "--no-browser", "--port", str(port), "--dir", str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=ROOT,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"workbench: port {port} cannot be used")
    assert "Traceback" not in done.stderr


def test_lab_in_a_checkout_opens_its_own_notebooks_whatever_package_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab, "checkout_notebooks", lambda: None)  # as for a package that was installed
    monkeypatch.chdir(ROOT)
    assert choose_directory(None, say=pytest.fail) == ROOT / "notebooks"
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "another"\n')
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    assert choose_directory(None, say=said.append) == tmp_path / "workbench-notebooks"
    assert [line.partition(" notebooks")[0] for line in said] == [f"copied {len(find_notebooks())}"]
