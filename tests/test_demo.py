"""Pins the main job from outside: real torchrun, real ranks, a report, and nothing left running whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.marked import assert_nothing_runs_of, started_by
from workbench.demo import DemoSpec, claim_directory, default_layout
from workbench.demo.directory import write_private
from workbench.demo.run import _crowding, _rejections
from workbench.errors import ArgumentError
from workbench.launch import find_survivors, run_tag, stop_survivors
from workbench.launch.survivors import mark_lives, mark_pid

ROOT = Path(__file__).parent.parent
SMALL = ["--hidden", "64", "--tokens", "1,8", "--rounds", "2"]


_started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def nothing_stays():
    """A test that fails must not leave a job behind."""
    yield
    while _started:
        process = _started.pop()
        family = descendants(process) if process.poll() is None else []
        process.kill()
        for child in family:
            child.kill()
        process.wait()


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "workbench", "demo", *SMALL, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "WORKBENCH_DEVICE": "cpu"},
    )
    _started.append(process)
    return process


def finish(process: subprocess.Popen[str], timeout: float = 300) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def wait_for_ranks(process: subprocess.Popen[str], count: int) -> list[psutil.Process]:
    """The job's processes once `count` ranks run our module."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        family = descendants(process)
        ranks = []
        for child in family:
            try:
                line = child.cmdline()
            except psutil.Error:
                continue
            if "workbench.demo.rank" in line and "workbench.launch.agent" not in line:
                ranks.append(child)
        if len(ranks) == count:
            return family
        time.sleep(0.05)
    raise AssertionError("the ranks did not start")


def assert_all_gone(family: list[psutil.Process]) -> None:
    assert len(family) >= 3
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []


def test_the_demo_runs_two_at_once_and_each_writes_its_own_report(tmp_path: Path) -> None:
    first = start("--ranks", "4", "--rounds", "20", "--json", cwd=tmp_path)  # it still runs when the second begins
    wait_for_ranks(first, 4)
    second = start("--ranks", "2", cwd=tmp_path)
    status, out, err = finish(first)
    assert status == 0, err
    document = json.loads(out)
    assert document["schema"] == 1
    assert (document["ranks"], document["device"], document["ok"]) == (4, "cpu", True)
    assert document["groups"]["attn_cp"]["ranks"] == [[0, 2], [1, 3]]
    for kind in ("tp", "attention_tp", "attn_cp", "moe_ep", "moe_tp"):
        result = document["groups"][kind]
        assert result["bit_equal"]
        assert 0 <= result["max_error"] <= 2**-8
        assert result["fused_us"] > 0
        assert result["steps_us"] > 0
        assert result["unfused_us"] > 0
    assert document["compared"]["unfused"] == "gloo's all-reduce over TCP, then an add, then torch's RMSNorm"
    report = Path(document["report"])
    assert report == tmp_path / "workbench-demo" / "report.html"
    assert report.stat().st_mode & 0o077 == 0
    assert sorted(p.name for p in (report.parent / "trace").iterdir()) == [f"rank-0000{r}.wbtrace" for r in range(4)]

    status, out, err = finish(second)
    assert status == 0, err
    assert str(tmp_path / "workbench-demo-2" / "report.html") in out
    assert_nothing_runs_of(first.pid)
    assert_nothing_runs_of(second.pid)


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_job_and_leaves_nothing_running(tmp_path: Path, sent: signal.Signals, status: int) -> None:
    process = start("--ranks", "4", "--rounds", "1000", cwd=tmp_path)
    family = wait_for_ranks(process, 4)
    process.send_signal(sent)
    found, out, err = finish(process)
    assert found == status, err
    assert out == ""
    assert "Traceback" not in err
    assert_nothing_runs_of(process.pid)
    assert_all_gone(family)


def test_a_killed_starter_takes_its_ranks_along_or_clean_does(tmp_path: Path) -> None:
    process = start("--ranks", "2", "--rounds", "1000", cwd=tmp_path)
    family = wait_for_ranks(process, 2)
    process.kill()
    finish(process)
    pids = {p.pid for p in started_by(process.pid)}
    assert pids <= {p.pid for p in family}
    stop_survivors(tuple(s for s in find_survivors() if s.pid in pids))  # those of other jobs are not ours to end
    assert_all_gone(family)
    assert_nothing_runs_of(process.pid)


def test_a_killed_rank_ends_the_job_and_is_named(tmp_path: Path) -> None:
    process = start("--ranks", "4", "--rounds", "1000", cwd=tmp_path)
    family = wait_for_ranks(process, 4)
    victim = next(p for p in family if p.environ().get("RANK") == "2")
    victim.kill()
    status, out, err = finish(process)
    assert status == 1, err
    assert out == ""
    assert "world rank 2" in err
    assert_all_gone(family)


def test_a_job_past_its_limit_is_ended(tmp_path: Path) -> None:
    """Loading torch alone takes longer than half a second, and so would a thousand rounds."""
    process = start("--ranks", "2", "--rounds", "1000", "--limit", "0.5", cwd=tmp_path)
    status, _, err = finish(process)
    assert status == 1
    assert "longer than 0.5 s" in err
    assert_nothing_runs_of(process.pid)


@pytest.mark.parametrize("name", ["thesis.tex", "logs", "report.html"])
def test_a_directory_that_no_demo_made_is_never_emptied(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine.txt").write_text("mine")
    with pytest.raises(ArgumentError, match=name), claim_directory(tmp_path):
        pass
    assert (tmp_path / name / "mine.txt").read_text() == "mine"


def test_a_directory_of_a_demo_is_emptied_and_its_files_are_private(tmp_path: Path) -> None:
    for _ in range(2):
        with claim_directory(tmp_path / "out") as out:
            assert [p.name for p in out.iterdir()] == [".workbench-demo"]
            write_private(out / "result.json", "{}")
            assert (out / "result.json").stat().st_mode & 0o077 == 0
            with pytest.raises(FileExistsError):
                write_private(out / "result.json", "again")


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ArgumentError, match="writable by nobody else"), claim_directory(tmp_path / "open"):
        pass


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "result.json").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        write_private(tmp_path / "result.json", "overwritten")
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_rank_whose_starter_died_before_it_could_look_ends_itself() -> None:
    """The starter is gone by the time the rank, busy with imports, asks: its parent is init, its mark tells."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    mark = run_tag(dead.pid)
    dead.wait()
    code = "from workbench.launch import end_with_starter; import time; end_with_starter(); time.sleep(100)"
    orphan = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "WORKBENCH_RUN": mark}, timeout=200, check=False, cwd=ROOT
    )
    assert orphan.returncode == -signal.SIGTERM


def test_marks_of_another_pid_namespace_are_left_alone() -> None:
    mark = run_tag()
    assert mark_lives(mark)
    assert mark_pid(mark) == os.getpid()
    elsewhere = mark.rsplit(".", 1)[0] + ".1"
    assert mark_pid(elsewhere) == 0
    assert not _is_survivor(elsewhere)
    assert _is_survivor("1.1." + mark.rsplit(".", 1)[1])


def _is_survivor(mark: str) -> bool:
    """Whether a process with this mark would be taken for a survivor."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(200)"], env={"WORKBENCH_RUN": mark})
    try:
        return child.pid in {s.pid for s in find_survivors()}
    finally:
        child.kill()
        child.wait()


def test_a_directory_in_use_is_refused_and_the_default_moves_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with claim_directory(None) as first, claim_directory(None) as second:
        assert (first.name, second.name) == ("workbench-demo", "workbench-demo-2")
        with pytest.raises(ArgumentError, match="in use"), claim_directory(first):
            pass
    with claim_directory(None) as again:
        assert again == first


def test_default_layouts_show_subgroups_where_the_number_allows() -> None:
    assert default_layout(4) == ("sglang", {"tp": 4, "attn_cp": 2, "moe_ep": 2})
    assert default_layout(3) == ("sglang", {"tp": 3})
    assert default_layout(2) == ("sglang", {"tp": 2})


def test_without_a_compiler_the_demo_says_why_the_fast_path_was_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    told = "tp: gloo, not shm: world ranks 0, 1: CXX='no-such-compiler' names no program"
    status, out, err = finish(start("--ranks", "2", "--tokens", "1", "--hidden", "64", "--rounds", "1", cwd=tmp_path))
    assert status == 0, err
    assert [line.partition(";")[0] for line in out.splitlines()].count(told) == 1
    assert out.splitlines()[0].endswith("fused us  steps us  unfused us  by fusing  speed-up")
    assert "by fusing: steps / fused, the same transport, so fusing alone" in out
    assert "CXX=&#x27;no-such-compiler" in (tmp_path / "workbench-demo" / "report.html").read_text()


def test_notes_name_each_reason_once_and_more_ranks_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    def group(choice: str, *rejected: tuple[str, str]) -> dict[str, Any]:
        return {"plan": {"choice": choice, "rejected": rejected}}

    groups = {
        "tp": group("gloo", ("shm", "world ranks 0..3: no compiler")),
        "cp": group("gloo", ("shm", "world ranks 0, 2: no compiler")),
        "ep": group("shm"),
    }
    assert _rejections(groups) == ["tp, cp: gloo, not shm: world ranks 0..3: no compiler"]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    spec = DemoSpec(system="sglang", sizes={"tp": 4}, device="cpu")
    assert _crowding(spec, 4) == "4 ranks share 2 cores: times are noise, and ratios vary between runs"
    assert _crowding(spec, 2) == ""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    on_gpus = replace(spec, device="cuda")
    assert _crowding(on_gpus, 2) == ""
    assert _crowding(on_gpus, 4) == "4 ranks share 2 GPUs: times are noise, and ratios vary between runs"
