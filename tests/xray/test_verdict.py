"""The verdict from files: of several jobs, of files that are half made or hostile; and what is refused before a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.observe.traced import environment
from tests.xray.test_live import processes_naming
from workbench.observe import find_jobs
from workbench.observe.jobs import claim_job
from workbench.ranks import GroupKey
from workbench.trace import Recorder, TraceError
from workbench.xray import judge

WORLD = GroupKey("world", (0, 1))


def record_job(directory: Path, run: str, *, error_on: int | None = None) -> None:
    """Two ranks that make one call each; one of them may raise before it."""
    for rank in (0, 1):
        with Recorder.open(claim_job(str(directory), {"TORCHELASTIC_RUN_ID": run}, rank), rank) as recorder:
            lane = recorder.group(WORLD)
            lane.end(lane.begin("all_reduce", shape=(2,), dtype="float32"))
            if rank == error_on:
                recorder.instant("exception", error="ValueError: bad sample")
            recorder.instant("exit", note=f"status={int(rank == error_on)}")


def test_every_job_of_one_command_is_judged(tmp_path: Path) -> None:
    record_job(tmp_path, "first", error_on=1)
    record_job(tmp_path, "second")
    record_job(tmp_path, "third", error_on=0)
    verdict = judge(tmp_path)
    assert [(f.kind, f.ranks) for f in verdict.findings] == [("peer-exception", (1,)), ("peer-exception", (0,))]
    assert [[p.name for p in job] for job in find_jobs([tmp_path])] == [[tmp_path.name], ["job-2"], ["job-3"]]


def test_a_restart_belongs_to_the_job_and_only_the_last_attempt_counts(tmp_path: Path) -> None:
    record_job(tmp_path, "one", error_on=1)
    record_job(tmp_path, "one")
    assert len(find_jobs([tmp_path])) == 1
    assert judge(tmp_path).findings == ()


def test_a_file_that_is_still_being_made_is_no_error_while_the_job_runs(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.wbtrace").write_bytes(bytes(8 << 20))
    assert judge(tmp_path, running=True, deadline_s=1.0).trace is None
    with pytest.raises(TraceError, match=r"rank-00000\.wbtrace.*its rank died while making it"):
        judge(tmp_path)


@pytest.mark.parametrize("nonsense", ['{"pid": 1e999, "status": 1e999}', "[" * 50_000, "{}", '{"boot_id": 1', "\udcff"])
def test_nonsense_beside_the_traces_is_passed_over(tmp_path: Path, nonsense: str) -> None:
    record_job(tmp_path, "one", error_on=1)
    for name in ("exits.jsonl", "ended.json"):
        (tmp_path / name).write_text(nonsense, errors="surrogateescape")
    assert [f.ranks for f in judge(tmp_path).findings] == [(1,)]


@pytest.mark.parametrize("number", ["NaN", "1e308", "-1", "1e999"])
def test_a_deadline_that_none_can_have_is_no_note_of_an_end(tmp_path: Path, number: str) -> None:
    record_job(tmp_path, "one", error_on=1)
    text = json.dumps({"boot_id": "b", "monotonic_ns": 1, "deadline_s": 0}).replace(
        '"deadline_s": 0', f'"deadline_s": {number}'
    )
    (tmp_path / "ended.json").write_text(text)
    assert [f.ranks for f in judge(tmp_path).findings] == [(1,)]


def test_what_an_exception_says_does_not_reach_the_terminal_as_commands(tmp_path: Path) -> None:
    with Recorder.open(tmp_path, 0) as recorder:
        recorder.instant("exception", error="ValueError: \x1b[2J\x1b]0;title\x07 na\u00efve")
        recorder.instant("exit", note="status=1")
    text = str(judge(tmp_path))
    assert "\\x1b[2J\\x1b]0;title\\x07 na\u00efve" in text
    assert "\x1b" not in text


def trace(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "workbench", "trace", *arguments],
        env=environment(),
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--deadline", "nan"), "nan is no number of seconds"),
        (("--json", "missing/verdict.json"), "missing/verdict.json cannot be written: No such file or directory"),
    ],
)
def test_what_cannot_work_is_refused_before_the_command_runs(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    done = trace(tmp_path, *arguments, "--", "touch", "ran")
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert not (tmp_path / "ran").exists()


def test_a_command_that_recorded_nothing_is_said_to_be_unjudged(tmp_path: Path) -> None:
    done = trace(tmp_path, "--json", "verdict.json", "--", "echo", "hello")
    assert (done.returncode, done.stdout) == (0, "hello\n")
    assert "nothing recorded: no process used torch.distributed" in done.stderr


REMOVES = """
import os, shutil, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(2))
traces = os.environ["WORKBENCH_OBSERVE"]
exec(sys.argv[1])
dist.all_reduce(torch.ones(2))
print("went on")
"""


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("shutil.rmtree(traces)", "/trace was removed while the command ran, and what was recorded with it"),
        (
            "shutil.rmtree(traces); os.makedirs(traces)",
            "/trace was removed while the command ran, and what was recorded with it",
        ),
        ("os.unlink(f'{traces}/rank-00000.wbtrace')", "what world rank 0 recorded is gone from "),
        ("os.truncate(f'{traces}/rank-00000.wbtrace', 0)", "/rank-00000.wbtrace: 0 bytes long"),
    ],
)
def test_records_that_are_removed_while_they_are_made_leave_no_verdict_and_say_so(
    tmp_path: Path, what: str, told: str
) -> None:
    done = trace(tmp_path, "--json", "verdict.json", "--", sys.executable, "-c", REMOVES, what)
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr
    assert json.loads((tmp_path / "verdict.json").read_text())["verdict"] == "unknown"
    last = done.stderr.splitlines()[-1]
    assert last.startswith("no verdict: ")
    assert told in last


def test_without_the_records_of_one_rank_no_verdict_says_that_all_is_well(tmp_path: Path) -> None:
    record_job(tmp_path, "one")
    assert judge(tmp_path).word == "ok"
    (tmp_path / "rank-00001.wbtrace").unlink()
    verdict = judge(tmp_path)
    assert (verdict.word, verdict.trace is not None and verdict.trace.complete) == ("unknown", False)
    assert str(verdict).splitlines() == [
        "no defect found in 3 events of 1 ranks",
        f"no verdict: what world rank 1 recorded is gone from {tmp_path}",
    ]


def test_a_rank_that_became_another_has_not_lost_its_records(tmp_path: Path) -> None:
    claim_job(str(tmp_path), {"TORCHELASTIC_RUN_ID": "one"}, 7)
    with Recorder.open(claim_job(str(tmp_path), {"TORCHELASTIC_RUN_ID": "one"}, 0), 0) as recorder:
        recorder.group(WORLD).begin("all_reduce")
    assert judge(tmp_path).lost == ""


def test_a_verdict_that_finds_no_room_is_still_said(tmp_path: Path) -> None:
    done = trace(tmp_path, "--json", "/dev/full", "--", "true")
    assert done.returncode == 1
    assert "; it cannot be written: [Errno 28]" in done.stderr


def test_a_command_ends_with_the_workbench_that_was_killed(tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    job = subprocess.Popen(
        [sys.executable, "-m", "workbench", "trace", "--", sys.executable, str(child)],
        env=environment(),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert job.stdout is not None
        with job.stdout:
            assert job.stdout.readline() == "up\n"
        os.kill(job.pid, signal.SIGKILL)
        job.wait(30)
        deadline = time.monotonic() + 30
        while processes_naming(str(child)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert processes_naming(str(child)) == []
    finally:
        for pid in (*processes_naming(str(child)), job.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
