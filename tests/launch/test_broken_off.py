"""Pins that a driver that is killed at a bad moment leaves no process, and two drivers do no harm to each other."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from _thread import interrupt_main
from pathlib import Path

import psutil
import pytest

from tests.launch import bodies
from workbench import Cluster

ROOT = Path(__file__).parent.parent.parent
START = "from workbench import Cluster\nCluster(ranks=2, device='cpu', keep={keep})\nimport time\ntime.sleep(600)"
STUBBORN = """
from workbench import Cluster
cluster = Cluster(ranks=2, device="cpu")
cluster._crew.send('''
import pathlib, signal, subprocess, tempfile
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
subprocess.Popen(["sleep", "600"])
pathlib.Path(tempfile.gettempdir(), f"up{rank}").touch()
while True:
    pass
''', (), {}, (0, 1))
import time
time.sleep(600)
"""


def _kill_driver(code: str, temporary: Path, ready: str) -> list[psutil.Process]:
    """Run a driver until a file like `ready` is in its temporary directory, kill it; gives all it had started."""
    environment = {**os.environ, "TMPDIR": str(temporary)}
    driver = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment)
    try:
        deadline = time.monotonic() + 100
        while not list(temporary.glob(ready)) and time.monotonic() < deadline:
            assert driver.poll() is None, "the driver ended by itself"
            time.sleep(0.02)
        assert list(temporary.glob(ready)), f"no {ready} came"
        return psutil.Process(driver.pid).children(recursive=True)
    finally:
        driver.kill()
        driver.wait()


def _left(temporary: Path, within_s: float) -> list[str]:
    """The commands that still run with this temporary directory once `within_s` have passed, or none before; ended."""
    deadline = time.monotonic() + within_s
    while (found := _with(temporary)) and time.monotonic() < deadline:
        time.sleep(0.1)
    told = []
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            told.append(" ".join(process.cmdline()))
            process.kill()
    return told


def _with(temporary: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("TMPDIR") == str(temporary):
                found.append(process)
    return found


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("ready", ["workbench-*/*/controller.log", "workbench-*/*/stacks-1.txt"])
def test_a_start_that_was_broken_off_leaves_no_process_kept_or_not(tmp_path: Path, keep: bool, ready: str) -> None:
    started = _kill_driver(START.format(keep=keep), tmp_path, ready)
    assert started
    assert _left(tmp_path, within_s=40) == []


def test_ctrl_c_at_any_moment_of_a_start_leaves_nothing_and_the_next_start_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(psutil.Process().children(recursive=True))
    for after_s in (0.0, 0.03, 0.3, 1.0):
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(after_s, interrupt_main).start()
            with Cluster(ranks=2, device="cpu"):
                time.sleep(60)
        left = set(psutil.Process().children(recursive=True)) - before
        assert [p.cmdline() for p in left if p.status() != psutil.STATUS_ZOMBIE] == []
        assert not list(tmp_path.glob("workbench-*/*"))
    with Cluster(ranks=2, device="cpu") as cluster:
        assert cluster.run(bodies.sum_over) == (11.0, 11.0)


def test_ranks_that_ignore_every_signal_and_what_they_started_end_with_a_killed_driver(tmp_path: Path) -> None:
    started = _kill_driver(STUBBORN, tmp_path, "up1")
    assert "sleep" in [process.name() for process in started if process.is_running()]
    assert _left(tmp_path, within_s=40) == []


def test_two_drivers_of_one_cluster_rebuild_and_restart_in_turn(cluster: Cluster) -> None:
    other = Cluster.attach(cluster.name)
    try:
        for driver in (other, cluster, other):
            driver.rebuild()
            assert driver.run(bodies.sum_over) == (1111.0,) * 4
        cluster.restart()
        assert other.run(bodies.sum_over) == (1111.0,) * 4
        other.restart()
        assert cluster.run(bodies.sum_over) == (1111.0,) * 4
        assert other.status.pids == cluster.status.pids
    finally:
        other.detach()


def test_modules_and_settings_beside_a_notebook_are_not_run_by_controller_and_agent(tmp_path: Path) -> None:
    """Nor does it matter that the home cannot be written, nor what the temporary directory is called."""
    temporary = tmp_path / "mit Leerzeichen, ünd 'quotes' ☃" / ("long" * 40)
    temporary.mkdir(parents=True)
    beside = tmp_path / "beside"
    beside.mkdir()
    for name in ("queue", "random", "tornado", "zmq", "psutil", "ipcontroller_config", "ipengine_config"):
        (beside / f"{name}.py").write_text(f"open({str(tmp_path / 'planted')!r}, 'w')\nraise RuntimeError('planted')\n")
    code = (
        "import sys; sys.path[:] = [p for p in sys.path if p]; from workbench import Cluster\n"
        "with Cluster(ranks=1, device='cpu') as c: print(c.run(len, 'abc'))"
    )
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT), "HOME": "/proc"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=beside, env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.stdout == "(3,)\n", done.stderr
    assert not (tmp_path / "planted").exists()
