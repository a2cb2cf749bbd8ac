"""`workbench trace` while the command runs: verdict at the deadline, an end to what it started, and to nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.observe.traced import environment, torchrun, workbench_diagnose, workbench_trace


def processes_naming(text: str) -> list[int]:
    """Live processes whose command line holds `text`."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(text in part for part in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.mark.timeout(200)
def test_a_job_that_hangs_is_judged_at_the_deadline_and_ended(tmp_path: Path) -> None:
    tag = f"tag={tmp_path}"
    traced = workbench_trace(tmp_path, torchrun("hangs.py", tag, ranks=3), deadline_s=4)
    assert traced.status == 3, traced.stderr
    first = traced.document["findings"][0]
    assert (first["kind"], first["ranks"]) == ("missing-call", [1])
    assert traced.document["world_size"] == 3
    assert "hangs.py:17: dist.all_reduce(torch.ones(2))" in traced.stderr, "the line of code"
    assert "world rank 0: waiting, inside all_reduce" in traced.stderr
    assert "stack of world rank 1, innermost last:" in traced.stderr
    assert "main (" in traced.stderr.partition("stack of world rank 1")[2]
    assert "observe/process_groups.py" not in traced.stderr, "the recording's own frames are nobody's business"
    assert traced.document["command_status"] != 0
    assert processes_naming(tag) == []
    report = (traced.directory / "report.html").read_text()
    for heading in (
        "First cause: missing-call",
        "Where each rank stood",
        "Who is in which group",
        "Who waited for whom",
    ):
        assert heading in report
    again = workbench_diagnose(traced.directory, "--json")
    assert again.returncode == 3
    assert json.loads(again.stdout)["findings"][0]["ranks"] == [1]


def test_ranks_that_sleep_outside_any_call_are_left_alone(tmp_path: Path) -> None:
    traced = workbench_trace(tmp_path, torchrun("hangs.py", "all"), deadline_s=2)
    assert (traced.status, traced.document["verdict"]) == (0, "ok"), traced.stderr


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_without_findings_the_status_is_the_commands_own(tmp_path: Path, code: str, status: int) -> None:
    traced = workbench_trace(tmp_path, [sys.executable, "-c", code])
    assert traced.status == status
    assert traced.document["command_status"] == status
    assert traced.document["world_size"] == 0


def test_a_command_that_is_not_there_is_bad_input(tmp_path: Path) -> None:
    traced = workbench_trace(tmp_path, ["no-such-command"])
    assert traced.status == 2
    assert "'no-such-command' cannot be run" in traced.stderr


def test_with_json_on_stdout_the_commands_own_output_goes_to_stderr(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "workbench", "trace", "--json", "-", "--"]
    done = subprocess.run(
        [*command, sys.executable, "-c", "print('hello')"],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout)["verdict"] == "unknown"
    assert "hello\n" in done.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_passes_through_and_sigterm_ends_the_job(tmp_path: Path, number: int, status: int) -> None:
    child = tmp_path / "child.py"
    child.write_text(
        "import time\nprint('up', flush=True)\ntry:\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    print('cut')\n"
    )
    job = subprocess.Popen(
        [sys.executable, "-m", "workbench", "trace", "--", sys.executable, str(child)],
        env=environment(),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "up\n"
        os.kill(job.pid, number)
        rest, _ = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode == status
    assert rest == ("cut\n" if number == signal.SIGINT else "")
    assert processes_naming(str(child)) == []


def test_a_job_that_was_not_recorded_is_looked_at_from_outside(tmp_path: Path) -> None:
    job = subprocess.Popen(
        torchrun("hangs.py", f"tag={tmp_path}", ranks=2),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    view: dict[str, object] = {}
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            done = subprocess.run(
                [sys.executable, "-m", "workbench", "diagnose", "--json", "--pid", str(job.pid)],
                env=environment(),
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            if done.returncode == 0 and "hangs.py:17" in done.stdout:
                view = json.loads(done.stdout)
                break
            time.sleep(1)
    finally:
        for pid in processes_naming(f"tag={tmp_path}"):
            os.kill(pid, signal.SIGKILL)
        job.wait(30)
    assert view["verdict"] == "unknown"
    assert view["world_size"] == 2
    assert any("was not started by `workbench trace`" in text for text in view["unseen"])  # type: ignore[attr-defined]


STOPS = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
dist.all_reduce(torch.ones(2))
"""


@pytest.mark.timeout(200)
def test_a_rank_whose_process_is_stopped_is_told_of_also_from_the_records(tmp_path: Path) -> None:
    program = tmp_path / "stops.py"
    program.write_text(STOPS)
    traced = workbench_trace(tmp_path, torchrun(program), deadline_s=4)
    first = traced.document["findings"][0]
    assert (first["code"], first["ranks"], first["certainty"]) == ("stopped.process", [1], "is"), traced.stderr
    assert "world rank 1: running, last call: barrier #2 on world[0,1]" in traced.stderr
    assert ", its process is stopped" in traced.stderr
    again = json.loads(workbench_diagnose(traced.directory, "--json").stdout)
    assert (again["findings"][0]["code"], again["findings"][0]["ranks"]) == ("stopped.process", [1])
