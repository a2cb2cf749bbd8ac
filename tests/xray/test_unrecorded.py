"""Processes that use torch and are not recorded are told of while the command runs, once a reason, and at its end.

Exact: the reason of each way to lose the recording, who is told of, what the verdict is then.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.observe.traced import ROOT, environment, workbench_trace
from workbench.observe import recorded_environment
from workbench.xray.unrecorded import why_unrecorded

OURS = recorded_environment({}, "/traces")
STARTUP = OURS["PYTHONPATH"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["python", "train.py"],
        ["python", "-u", "-m", "torch.distributed.run", "-I", "train.py"],
        ["python", "-W", "ignore", "-X", "dev", "-c", "pass", "-S"],
        ["python", "-Wignore", "train.py", "-E"],
        ["python", "-"],
    ],
)
def test_what_records_itself_has_no_reason_not_to(arguments: list[str]) -> None:
    assert why_unrecorded(arguments, OURS) is None
    assert why_unrecorded(arguments, {**OURS, "PYTHONPATH": f"/lib/of/mine:{STARTUP}:/x"}) is None


@pytest.mark.parametrize("option", ["-I", "-S", "-E", "-uI"])
def test_options_that_switch_the_recording_off_are_named(option: str) -> None:
    reason = why_unrecorded(["python", "-W", "ignore", option, "train.py"], OURS)
    assert reason is not None
    assert reason.fix == f"start it without -{option[-1]}"


def test_a_pythonpath_that_was_set_anew_is_named_with_what_to_write_instead() -> None:
    reason = why_unrecorded(["python", "train.py"], {**OURS, "PYTHONPATH": "/x:/y"})
    assert reason is not None
    assert "its PYTHONPATH, /x:/y, leaves out" in reason.says
    assert reason.fix == "export PYTHONPATH=/x:/y${PYTHONPATH:+:$PYTHONPATH}"


def test_an_environment_that_was_taken_away_is_named() -> None:
    for environ in ({}, {"PYTHONPATH": "/x"}, {"PYTHONPATH": STARTUP}):
        reason = why_unrecorded(["python", "train.py"], environ)
        assert reason is not None
        assert "WORKBENCH_OBSERVE" in reason.fix


def test_a_sitecustomize_that_stands_before_the_recordings_is_named(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("")
    assert why_unrecorded(["python"], {**OURS, "PYTHONPATH": f"{STARTUP}:{tmp_path}"}) is None
    reason = why_unrecorded(["python"], {**OURS, "PYTHONPATH": f"{tmp_path}:{STARTUP}"})
    assert reason is not None
    assert str(tmp_path) in reason.says


SCRIPT = """
export PYTHONPATH={root}
RANK=1 WORLD_SIZE=2 {python} -c "import sys, time; time.sleep(60)" &  # no torch
RANK=0 WORLD_SIZE=2 {python} -c "import torch, os, time
while not os.path.exists('told'): time.sleep(0.1)" &
wait %2
kill %1
"""


@pytest.mark.timeout(200)
def test_a_script_that_sets_pythonpath_anew_is_told_of_while_it_runs_and_at_its_end(tmp_path: Path) -> None:
    script, document, root = tmp_path / "launch.sh", tmp_path / "verdict.json", tmp_path / "code"
    script.write_text(SCRIPT.format(root=root, python=sys.executable))
    with subprocess.Popen(
        [sys.executable, "-m", "workbench", "trace", "--json", str(document), "--", "bash", str(script)],
        env=environment(),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        try:
            assert job.stderr is not None
            told = next(line for line in job.stderr if line.startswith("workbench: "))
            (tmp_path / "told").touch()
            rest = job.stderr.read()
        finally:
            job.terminate()
    assert "(RANK=0) of this command uses torch and is not recorded" in told, "one rank, and not what has no torch"
    assert f"export PYTHONPATH={root}${{PYTHONPATH:+:$PYTHONPATH}}" in told
    assert rest.startswith("no verdict: process "), "told once, and again as the verdict"
    assert f"was not recorded: its PYTHONPATH, {root}, leaves out" in rest
    assert json.loads(document.read_text())["verdict"] == "unknown"


@pytest.mark.timeout(200)
def test_of_recorded_processes_and_of_helpers_without_torch_nothing_is_told(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import subprocess, sys, time, torch.distributed\n"
        "helper = subprocess.Popen([sys.executable, '-I', '-c', 'import time; time.sleep(60)'])\n"
        "time.sleep(12)\nhelper.kill()\n"
    )
    traced = workbench_trace(tmp_path, [sys.executable, str(program)])
    assert "not recorded" not in traced.stderr


def test_a_command_too_short_to_be_looked_at_is_told_the_reasons_there_can_be(tmp_path: Path) -> None:
    traced = workbench_trace(tmp_path, [sys.executable, "-I", "-c", "pass"])
    assert traced.document["verdict"] == "unknown"
    for reason in ("PYTHONPATH=DIR${PYTHONPATH:+:$PYTHONPATH}", "env -i", "python -I"):
        assert reason in traced.stderr


CHILD = "import os, workbench.observe as o; print(o.__file__); print(os.environ['PYTHONPATH'])"
PARENT = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {CHILD!r}]).returncode)"


@pytest.mark.timeout(200)
def test_another_copy_of_the_package_on_the_path_does_not_record_in_place_of_the_one_that_reads(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "workbench", copy / "workbench", ignore=shutil.ignore_patterns("__pycache__"))
    script, parent = tmp_path / "launch.sh", tmp_path / "parent.py"
    parent.write_text(PARENT)
    script.write_text(f"export PYTHONPATH=${{PYTHONPATH%%:*}}:{copy}\nexec {sys.executable} {parent}\n")
    traced = workbench_trace(tmp_path, ["sh", str(script)])
    assert traced.status == 0, traced.stderr
    recording, path = traced.stdout.splitlines()[:2]
    assert recording == str(ROOT / "workbench/observe/__init__.py")
    assert path == f"{STARTUP}:{copy}", "one recording, not two"
