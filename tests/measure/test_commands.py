"""Pins `workbench measure fused` and `workbench tune` from outside: real torchrun, exits, files, and nothing left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.marked import assert_nothing_runs_of, started_by
from workbench import cli
from workbench.measure import known_ways
from workbench.trace import Role, Scenario, parse_comparison

ROOT = Path(__file__).parent.parent.parent
STORED = ROOT / "benchmarks" / "2026-11-29-h200x2"
SMALL = ("--device", "cpu", "--hidden", "64", "--tokens", "1,3", "--rounds", "3", "--calls", "2")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def run(
    *arguments: str, torchrun: str = "", timeout: float = 200, environment: Mapping[str, str] = {}
) -> subprocess.CompletedProcess[str]:
    """One command with a directory for temporary files of its own; it must leave nothing there and nothing running."""
    program = ["-m", "workbench"] if not torchrun else ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    with tempfile.TemporaryDirectory() as temporary:
        process = subprocess.Popen(
            [sys.executable, *program, *([torchrun] if torchrun else []), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**ENVIRONMENT, "TMPDIR": temporary, **environment},
        )
        try:
            out, told = process.communicate(timeout=timeout)
        finally:
            process.kill()
            process.wait()
            for left in started_by(process.pid):
                left.kill()
        assert torchrun or os.listdir(temporary) == []  # torchrun keeps its own logs there
    assert "Traceback" not in told or torchrun
    return subprocess.CompletedProcess(process.args, process.returncode, out, told)


def run_forked(*arguments: str) -> subprocess.CompletedProcess[str]:
    """One command that starts no ranks, in a fork of this process, which has loaded torch already."""
    with tempfile.TemporaryDirectory() as temporary:
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                for descriptor, name in ((1, "out"), (2, "told")):
                    os.dup2(os.open(f"{temporary}/{name}", os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
                sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
                sys.argv[1:] = arguments
                try:
                    cli.main()
                except SystemExit as e:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(int(e.code or 0))
            os._exit(99)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out, told = (Path(temporary, name).read_text() for name in ("out", "told"))
    return subprocess.CompletedProcess(arguments, status, out, told)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """One run with its result in a file."""
    out = tmp_path_factory.mktemp("measured") / "now.json"
    return out, run("measure", "fused", *SMALL, "--ranks", "3", "--json", str(out))


def test_the_result_is_a_table_on_stdout_progress_on_stderr_and_a_file(measured: Any) -> None:
    out, done = measured
    assert done.returncode == 0, done.stderr
    assert "hidden 64, bfloat16, 3 ranks on CPU" in done.stdout
    assert "ours / best peer" in done.stdout
    assert "again: ours timed once more" in done.stdout
    assert "simulated" not in done.stdout  # no cost model knows a CPU
    assert "our way is shm; timed beside it: torch's all-reduce + norm, gloo\n" in done.stderr
    assert "together, 1 tokens: shm" in done.stderr
    result = parse_comparison(out.read_text(), "now.json")
    assert (result.ranks, result.hidden, result.finished) == (3, 64, True)
    assert [(row.scenario, row.tokens) for row in result.rows] == [(Scenario.TOGETHER, 1), (Scenario.TOGETHER, 3)]
    about = result.about
    assert {c.name for row in result.rows for c in row.columns if c.role is not Role.AGAIN} <= set(known_ways())
    assert {"commit", "workbench", "torch", "host", "method", "date"} <= about.keys()
    assert about["command"].startswith("workbench measure fused --device cpu --hidden 64")
    assert "/" not in about["command"].replace("now.json", "")  # no directory of this machine
    assert os.uname().nodename not in json.dumps(dict(about))
    assert [path.name for path in out.parent.iterdir()] == ["now.json"]


def test_json_to_stdout_is_one_document_and_ways_can_be_left_out() -> None:
    done = run("measure", "fused", *SMALL, "--json", "-", "--without", "gloo,norm")
    assert done.returncode == 0, done.stderr
    result = parse_comparison(done.stdout, "stdout")
    assert result.ranks == 2
    assert dict(result.rows[0].left_out) == dict.fromkeys(("gloo", "norm"), "left out as asked")
    assert [c.name for c in result.rows[0].columns] == ["shm", "gloo+norm", "shm again", "shm sum", "shm copied"]


def test_a_loss_against_the_baseline_exits_3_and_names_the_row(measured: Any, tmp_path: Path) -> None:
    """Against a baseline that no machine reaches at 3 tokens, and that every machine beats at 1."""
    document = json.loads(measured[0].read_text())
    for row, us in zip(document["rows"], (1e9, 1e-6), strict=True):
        for name in ("shm", "shm again"):
            row["columns"][name]["us"] = {"median": us, "p10": us, "p90": us}
    faster = tmp_path / "faster.json"
    faster.write_text(json.dumps(document))
    done = run("measure", "fused", *SMALL, "--ranks", "3", "--compare", str(faster))
    assert done.returncode == 3, done.stderr
    assert "slower than the baseline: 3 tokens (together)" in done.stderr
    assert "slower than the baseline: 1 tokens" not in done.stderr
    assert "1 of 2 rows in common got slower" in done.stderr


def test_with_a_compiler_that_is_broken_gloo_is_measured_and_the_reason_is_told(tmp_path: Path) -> None:
    broken = {"CXX": "/bin/false", "XDG_CACHE_HOME": str(tmp_path)}
    done = run("measure", "fused", *SMALL[:4], "--tokens", "1", "--rounds", "1", "--calls", "1", environment=broken)
    assert done.returncode == 0, done.stderr
    assert "\nwithout the shared-memory kernels, gloo serves: compiling the CPU kernels with /bin/false" in done.stderr
    assert "our way is gloo; timed beside it: torch's all-reduce + norm\n" in done.stderr
    assert "left out: shm: world ranks 0, 1: compiling the CPU kernels with /bin/false failed" in done.stdout


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"device": "NVIDIA H200"}, "the baseline has device NVIDIA H200, this run CPU"),
        ({"dtype": "float16"}, "the baseline has dtype float16, this run bfloat16"),
        ({"hidden": 128}, "the baseline has hidden 128, this run 64"),
        ({"ranks": 2}, "the baseline has ranks 2, this run 3"),
        ({"about": {"calls": 20}}, "the baseline was timed with calls 20, this run 2"),
        ({"rows": []}, "the baseline has no row in common with this run: it has none, this run 1 (together)"),
    ],
)
def test_a_baseline_of_other_work_is_refused_before_anything_starts(
    measured: Any, tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps(json.loads(measured[0].read_text()) | change))
    done = run_forked("measure", "fused", *SMALL, "--ranks", "3", "--compare", str(other))
    assert done.returncode == 2
    assert told in done.stderr
    assert "starting" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tokens", "1,1"], "different whole numbers"),
        (["--tokens", "0"], "different whole numbers"),
        (["--hidden", "12"], "multiples of 8"),
        (["--ranks", "1"], "--ranks"),
        (["--timeout", "nan"], "nan is not in the range 0<x<=3600"),
        (["--limit", "NaN"], "nan is not in the range 0<x<=86400"),
        (["--skew-us", "nan"], "nan is not in the range 1<=x<=1000000"),
        (["--arrival", "late"], "together, skewed"),
        (["--arrival", "skewed", "--chain", "gemm"], "is not measured"),
        (["--device", "cpu", "--peers", "tests"], "--peers holds kernels for GPUs"),
        (["--json", "/nowhere/now.json"], "cannot be written"),
        (["--json", "/dev/null"], "no regular file"),
        (["--json", "tests"], "no regular file"),
        (["--compare", "README.md"], "not a JSON document"),
        (["--compare", "/dev/zero"], "not a regular file"),
        (["--compare", "/nowhere/before.json"], "cannot be read"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_message_and_exit_2(arguments: list[str], told: str) -> None:
    done = run_forked("measure", "fused", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


def test_it_runs_under_torchrun_and_a_wrong_way_is_not_timed_and_exits_3() -> None:
    program = str(ROOT / "tests" / "measure" / "wrong_way.py")
    options = ("--device", "cpu", "--hidden", "64", "--tokens", "3", "--rounds", "2", "--json", "-")
    done = run("peer", "measure", "fused", *options, torchrun=program)
    assert done.returncode == 1, done.stderr  # torchrun's own: rank 0 ended with 3
    assert "exitcode  : 3" in done.stderr
    assert "a result is wrong, and not timed: gloo at 3 tokens (together): world rank 0: sum" in done.stderr
    result = parse_comparison(done.stdout, "stdout")
    (row,) = result.rows
    assert [name for name, _ in row.wrong] == ["gloo"]
    assert row.named("gloo") is None
    assert row.column(Role.OURS) is not None
    assert row.best_peer == "gloo+norm"


def test_our_own_way_is_not_timed_either_if_it_is_wrong() -> None:
    program = str(ROOT / "tests" / "measure" / "wrong_way.py")
    options = ("--device", "cpu", "--hidden", "64", "--tokens", "3", "--rounds", "2", "--json", "-", "--chain", "gemm")
    done = run("ours", "measure", "fused", *options, torchrun=program)
    assert "exitcode  : 3" in done.stderr
    assert "our way is missing at 3 tokens (gemm)" in done.stderr
    (row,) = parse_comparison(done.stdout, "stdout").rows
    assert [c.name for c in row.columns] == ["gemms", "gloo+norm"]
    assert (row.ratio, row.column(Role.OURS)) == (None, None)


def test_ctrl_c_ends_it_and_leaves_nothing_running(tmp_path: Path) -> None:
    out = tmp_path / "now.json"
    (tmp_path / "temporary").mkdir()
    many = ",".join(str(n) for n in range(1, 200))
    arguments = (*SMALL[:4], "--tokens", many, "--rounds", "3", "--calls", "2", "--json", str(out))
    process = subprocess.Popen(
        [sys.executable, "-m", "workbench", "measure", "fused", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**ENVIRONMENT, "TMPDIR": str(tmp_path / "temporary")},
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("together, 1 tokens"):  # a row is there, the next one is being timed
                break
        assert len(started_by(process.pid)) >= 3
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=100)
        assert process.returncode == 130, told
        assert "Traceback" not in told
        assert_nothing_runs_of(process.pid)
        kept = parse_comparison(out.read_text(), "kept")  # what was known
        assert (kept.finished, len(kept.rows) >= 1) == (False, True)
        assert os.listdir(tmp_path / "temporary") == []
    finally:
        process.kill()
        process.wait()


def test_past_its_limit_it_ends_with_1_whoever_notices_first() -> None:
    """The ranks count from when they have loaded torch, the starter from before; on a busy machine it may be first."""
    done = run("measure", "fused", *SMALL[:4], "--tokens", "1,2", "--rounds", "9999", "--limit", "1")
    assert done.returncode == 1
    assert "ended after --limit 1 s; the last news:" in done.stderr or "longer than 1 s" in done.stderr


def test_a_rank_past_its_limit_says_where_it_was() -> None:
    arguments = ("measure", "fused", *SMALL[:4], "--tokens", "1,2", "--rounds", "9999", "--limit", "1")
    done = run("workbench", *arguments, torchrun="-m")
    assert done.returncode == 1
    assert "ended after --limit 1 s; the last news:" in done.stderr


def test_tune_measures_writes_a_table_and_why_reads_it(tmp_path: Path) -> None:
    """Beside a gloo that sleeps, so that our way wins on any machine."""
    out = tmp_path / "tuned.json"
    program = str(ROOT / "tests" / "measure" / "wrong_way.py")
    options = ("--device", "cpu", "--hidden", "64", "--tokens", "1,3", "--rounds", "2", "--calls", "1")
    done = run("slow peer", "tune", *options, "--without", "gloo+norm", "--out", str(out), torchrun=program)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    table = json.loads(out.read_text())
    assert (table["arches"], list(table["world_sizes"])) == (["cpu"], ["2"])
    asked = ("why", "sglang", "--size", "tp=2", "--machine", "h200x2", "--hidden", "64", "--tokens", "1")
    assert run_forked(*asked, "--table", str(out)).returncode == 0


def test_tune_finds_that_nothing_is_won_and_writes_no_table(tmp_path: Path) -> None:
    """Our way is the sleeping gloo, and torch's is faster."""
    out = tmp_path / "tuned.json"
    program = str(ROOT / "tests" / "measure" / "wrong_way.py")
    options = ("--device", "cpu", "--hidden", "64", "--tokens", "1", "--rounds", "2", "--calls", "1")
    done = run("slow ours", "tune", *options, "--out", str(out), torchrun=program)
    assert "exitcode  : 3" in done.stderr
    assert "our way was faster than the best peer at no size" in done.stderr
    assert not out.exists()


def test_tune_refuses_a_place_before_it_measures() -> None:
    done = run("tune", *SMALL[:4], "--tokens", "1", "--out", "/nowhere/tuned.json")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "cannot be written" in done.stderr


def test_a_table_tuned_from_stored_runs_decides_up_to_the_largest_size_that_was_won(tmp_path: Path) -> None:
    out = tmp_path / "tuned.json"
    sources = [word for name in ("h7168", "h4096") for word in ("--from", str(STORED / f"{name}.json"))]
    assert run_forked("tune", *sources, "--out", str(out)).returncode == 0

    def decide(tokens: int, *more: str) -> tuple[str, str]:
        asked = ("why", "sglang", "--size", "tp=2", "--machine", "h200x2", "--hidden", "7168", "--tokens", str(tokens))
        done = run_forked(*asked, "--kind", "tp", "--json", *more)
        plan = json.loads(done.stdout)["groups"][0]["plan"]
        return plan["choice"], plan["standing"]

    assert decide(4096, "--table", str(out)) == ("custom.fused.push", "measured")
    assert decide(4097, "--table", str(out)) == ("nccl", "default")
    document = json.loads(out.read_text())
    document["world_sizes"]["2"]["fused"][0]["up_to"] = "14K"  # one token
    document["world_sizes"]["2"]["graph"][0]["up_to"] = "14K"
    out.write_text(json.dumps(document))
    assert decide(1, "--table", str(out)) == ("custom.fused.push", "measured")
    assert decide(2, "--table", str(out)) == ("nccl", "default")
    assert decide(2) == ("custom.fused.push", "measured")  # the shipped table


def test_a_table_that_does_not_fit_is_refused_by_field(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"schema": 1}')
    asked = ("why", "sglang", "--size", "tp=2", "--machine", "h200x2", "--hidden", "64", "--tokens", "1")
    done = run_forked(*asked, "--table", str(wrong))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "field 'provenance' is missing" in done.stderr
