"""Pins who outlives whom, with real processes: a killed rank, a driver that goes, a kept cluster, two at once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from _thread import interrupt_main
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import ipyparallel
import psutil
import pytest

from tests.launch import bodies
from tests.launch.conftest import measured
from workbench import Cluster
from workbench.errors import ClosedError, ResourceError, WorkbenchError
from workbench.launch import RankDiedError, RanksFailedError, run_job
from workbench.launch.directory import directories
from workbench.launch.launcher import TorchrunEngineSetLauncher
from workbench.launch.survivors import mark_pid

ROOT = Path(__file__).parent.parent.parent
DRIVER = """
import json, os, sys, time
from tests.launch import bodies
from workbench import Cluster
cluster = Cluster(ranks=2, device="cpu", keep={keep})
cluster.run(bodies.remember, 100)
cluster._crew.send("import time; time.sleep({busy_s})", (), {{}}, (1,))
time.sleep(0.3)
p = cluster._crew.processes
marks = [p.controller, p.agent, *cluster._crew.record.rank_marks]
print(json.dumps([cluster.name, *(int(m.split(".")[0]) for m in marks)]), flush=True)
{end}
"""


def test_a_killed_rank_frees_the_others_and_all_start_again_with_their_numbers(cluster: Cluster) -> None:
    victim = cluster.status.pids[2]
    killed_at: list[float] = []

    def kill() -> None:
        killed_at.append(time.monotonic())
        os.kill(victim, signal.SIGKILL)

    threading.Timer(0.5, kill).start()
    with pytest.raises(RankDiedError, match="world rank 2: killed by SIGKILL") as told:
        cluster.run("import time\nwhile rank < 3:\n    time.sleep(0.01)\ndist.barrier()")
    assert measured("from the kill to the answer", time.monotonic() - killed_at[0]) < 8
    assert told.value.dead == (2,)
    with pytest.raises(RankDiedError, match=r"cluster\.restart\(\)"):
        cluster.run("1")
    with pytest.raises(RankDiedError):
        cluster.rebuild()
    started = time.monotonic()
    cluster.restart()
    assert measured("restart", time.monotonic() - started) < 60
    assert cluster.run(bodies.engine_id) == (0, 1, 2, 3)
    assert cluster.run(bodies.sum_over) == (1111.0,) * 4
    assert victim not in cluster.status.pids


def test_a_rank_that_ends_by_itself_is_told_with_its_status(cluster: Cluster) -> None:
    with pytest.raises(RankDiedError, match="world rank 1: exited with status 7"):
        cluster.run("import os; os._exit(7) if rank == 1 else dist.barrier()")
    cluster.restart()


def test_a_fault_is_told_by_its_rank_and_line_as_often_as_one_asks(cluster: Cluster) -> None:
    fault = r"world rank 1: killed by SIGSEGV\n +cell, line 3: ctypes\.string_at\(0\)\n"
    with pytest.raises(RankDiedError, match=fault):
        cluster.run("import ctypes\nif rank == 1:\n    ctypes.string_at(0)\ndist.barrier()", deadline_s=30)
    with pytest.raises(RankDiedError, match=fault) as told:
        cluster.run("1")
    assert told.value.dead == (1,)
    cluster.restart()


def test_a_rank_that_kills_its_process_group_kills_itself_alone(cluster: Cluster) -> None:
    code = "import os, signal\nif rank == 1:\n    os.killpg(0, signal.{})\nelse:\n    time.sleep(0.3)"
    cluster.run("import time")
    with pytest.raises(RanksFailedError) as told:
        cluster.run(code.format("SIGINT"), deadline_s=30)
    assert [(e.world_rank, e.name) for e in told.value.errors] == [(1, "KeyboardInterrupt")]
    with pytest.raises(RankDiedError, match="world rank 1: killed by SIGKILL"):
        cluster.run(code.format("SIGKILL") + "\ndist.barrier()", deadline_s=30)
    cluster.restart()


def test_a_restart_ends_a_cell_of_another_thread_and_can_be_broken_off(cluster: Cluster) -> None:
    ended: list[BaseException] = []

    def sleep() -> None:
        try:
            cluster.run("import time; time.sleep(60)")
        except WorkbenchError as e:
            ended.append(e)

    thread = threading.Thread(target=sleep)
    thread.start()
    threading.Timer(1.5, interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        time.sleep(0.5)
        cluster.restart()
        time.sleep(60)
    thread.join(20)
    assert len(ended) == 1
    with pytest.raises(RankDiedError, match=r"a restart .* was broken off; cluster\.restart\(\)"):
        cluster.run("1")
    cluster.restart()
    assert cluster.run(bodies.sum_over) == (1111.0,) * 4


def test_nothing_survives_a_driver_that_was_killed() -> None:
    name, *pids = _run_driver(keep=False, end="os.kill(os.getpid(), 9)")
    started = time.monotonic()
    assert _gone(pids, within_s=30)
    measured("nothing left after the driver was killed", time.monotonic() - started)
    while (directories() / name).exists() and time.monotonic() < started + 30:  # whoever ends last clears up last
        time.sleep(0.05)
    assert not (directories() / name).exists()
    assert name not in Cluster.find()


def test_a_kept_cluster_is_found_and_attached_by_the_next_driver() -> None:
    name, *pids = _run_driver(keep=True, busy_s=3, end="os._exit(1)")
    try:
        time.sleep(0.5)
        assert name in Cluster.find()
        started = time.monotonic()
        cluster = Cluster.attach(name)
        measured("attach", time.monotonic() - started)
        assert cluster.status.pids == tuple(pids[2:])
        assert cluster.status.busy == (1,)
        with pytest.raises(ClosedError, match="earlier cell: world rank 1"):
            cluster.run(bodies.recall)
        deadline = time.monotonic() + 30
        while cluster.status.busy and time.monotonic() < deadline:
            time.sleep(0.1)
        assert cluster.run(bodies.recall) == (100, 101)
        assert cluster.run(bodies.sum_over) == (11.0, 11.0)
        cluster.close()
        assert _gone(pids, within_s=5)
        with pytest.raises(ResourceError, match=f"cluster '{name}' cannot be attached; running: "):
            Cluster.attach(name)
    finally:
        for pid in pids:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)


def test_doctor_and_clean_tell_of_a_kept_cluster_and_clean_ends_it() -> None:
    name, *pids = _run_driver(keep=True, end="os._exit(1)")
    try:
        told = _workbench("doctor")
        assert f"{name}: 2 ranks on cpu, up for 0.0 h, kept until it is closed" in told
        assert f"-> Cluster.attach('{name}') in Python, or end it: workbench clean --cluster {name}" in told
        assert f"left running: {name}: 2 ranks on cpu" in _workbench("clean")
        assert all(map(psutil.pid_exists, pids))
        left = json.loads(_workbench("clean", "--cluster", name, "--json"))
        assert left["ended_cluster"] == name
        assert name not in [c["name"] for c in left["clusters"]]
        assert _gone(pids, within_s=5)
        assert name not in _workbench("doctor")
        assert f"no running cluster is called '{name}'" in _workbench("clean", "--cluster", name)
    finally:
        for pid in filter(psutil.pid_exists, pids):
            os.kill(pid, signal.SIGKILL)


def _workbench(*arguments: str) -> str:
    """What the command says on stdout, or else on stderr."""
    command = [sys.executable, "-m", "workbench", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    return done.stdout or done.stderr


def test_a_controller_that_was_killed_is_told_and_a_restart_without_it_refused_at_once() -> None:
    with Cluster(ranks=2, device="cpu") as cluster:
        controller = psutil.Process(mark_pid(cluster._crew.record.controller))
        (heart_monitor,) = controller.children()
        heart_monitor.kill()
        assert _gone([heart_monitor.pid], within_s=5)  # as the next look sees it, not the one in that moment
        with pytest.raises(ClosedError, match="has lost its heart monitor, so no rank can come up"):
            cluster.restart()
        assert cluster.run(bodies.sum_over) == (11.0, 11.0), "what is up goes on"
        controller.kill()
        with pytest.raises(RankDiedError, match=r"the controller was killed.*\nclose\(\) this cluster and start"):
            cluster.run("import time; time.sleep(60)")
        with pytest.raises(ClosedError, match=r"the controller of cluster .* has ended, so no rank can come up"):
            cluster.restart()
        ranks = cluster.status.pids
    assert _gone(list(ranks), within_s=5)


def test_two_clusters_work_at_once_and_one_ends_without_the_other(cluster: Cluster) -> None:
    with Cluster(ranks=2, device="cpu") as second:
        assert second.name != cluster.name
        assert set(second.status.pids).isdisjoint(cluster.status.pids)
        totals: dict[str, object] = {}
        thread = threading.Thread(target=lambda: totals.update(second=second.run(bodies.sum_over)))
        thread.start()
        totals["first"] = cluster.run(bodies.sum_over)
        thread.join()
        assert totals == {"first": (1111.0,) * 4, "second": (11.0, 11.0)}
        family = psutil.Process(mark_pid(second._crew.processes.agent))
        pids = [family.pid, *(p.pid for p in family.children(recursive=True))]
        started = time.monotonic()
    measured("close", time.monotonic() - started)
    assert _gone(pids, within_s=5)
    assert repr(second) == f"Cluster({second.name}, closed)"
    with pytest.raises(ClosedError, match="is closed"):
        second.run("1")
    assert cluster.run(bodies.sum_over) == (1111.0,) * 4


def test_ranks_that_do_not_come_up_tell_their_own_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other clusters of this user come and go
    monkeypatch.setattr("workbench.launch.cluster.place_ranks", lambda *_, **__: "cuda")  # which the ranks do not find
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ResourceError, match=r"did not come up: world rank \d: ") as told:
        Cluster(ranks=2, device="cuda")
    assert "torch finds no usable GPU" in str(told.value)
    assert "in choose_device" in str(told.value)
    assert directories().parent == tmp_path
    assert not list(directories().iterdir())


@contextlib.contextmanager
def _engines(tmp_path: Path) -> Iterator[ipyparallel.Client]:
    """Two ranks under ipyparallel's own Cluster."""
    cluster = ipyparallel.Cluster(
        engines=TorchrunEngineSetLauncher, n=2, controller_ip="127.0.0.1", profile_dir=str(tmp_path), load_profile=False
    )
    client = cluster._in_thread(cluster.start_and_connect)
    try:
        yield client
    finally:
        client.close()
        cluster._in_thread(cluster.stop_cluster)


def test_torchrun_is_an_engine_launcher_of_ipyparallel(cluster: Cluster, tmp_path: Path) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    module, _, name = declared["ipyparallel.engine_launchers"]["torchrun"].partition(":")
    assert getattr(import_module(module), name) is TorchrunEngineSetLauncher
    with _engines(tmp_path) as engines:
        assert engines[:].apply_sync(bodies.engine_id) == [0, 1]
        assert [e["RANK"] for e in engines[:].apply_sync(bodies.environment)] == ["0", "1"]
        looping = engines[:].execute("while True: pass", block=False)
        time.sleep(0.5)
        engines.cluster._in_thread(engines.cluster.signal_engines, signal.SIGINT)
        with pytest.raises(ipyparallel.CompositeError, match="KeyboardInterrupt"):
            looping.get(20)
        log = Path(engines.cluster.engine_set.output_file)
        assert "Completed registration" in log.read_text()
        assert "death signal" not in log.read_text(), "the agent took the interrupt for its own end"
        assert engines[:].apply_sync(bodies.engine_id) == [0, 1]
    assert cluster.run(bodies.sum_over) == (1111.0,) * 4, "their end is not that of others this process started"


def test_the_store_of_a_job_listens_on_the_loopback_interface_alone(tmp_path: Path) -> None:
    result = run_job(
        ["tests.launch.listeners"],
        ranks=2,
        log_dir=tmp_path / "log",
        timeout_s=100,
        environment={"LISTENERS": str(tmp_path)},
        on_progress=print,
    )
    assert result.status == 0, (tmp_path / "log" / "output.log").read_text()
    found = [address for path in tmp_path.glob("*.json") for address in json.loads(path.read_text())]
    assert len(found) > 2
    assert set(found) == {"127.0.0.1"}


def _run_driver(*, keep: bool, end: str, busy_s: float = 60) -> list[Any]:
    """Start a cluster in another process, which ends as told; gives its name and the pids of its processes."""
    code = DRIVER.format(keep=keep, end=end, busy_s=busy_s)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout, done.stderr
    return list(json.loads(done.stdout))


def _gone(pids: list[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(_runs(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
