"""`workbench diagnose` on logs, on directories that hold no trace or several runs, and its words on stacks alone.

Exact: exit status, fields of the document, and the words that say what to do.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.observe.traced import record, torchrun, workbench_diagnose
from tests.xray.test_verdict import record_job
from workbench.observe import Frame
from workbench.trace import Recorder
from workbench.xray.attach import Seen, View, look_at
from workbench.xray.logs import explain_lines

LOG = """\
step 1
[rank2]: RuntimeError: \x1b[31mConnection closed by peer\x1b[0m [127.0.0.1]:4711
step 2
[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:4713
[rank0]: RuntimeError: Connection reset by peer
ValueError: Global rank 0 is not part of group <ProcessGroup>
"""


def test_known_lines_of_a_log_are_told_once_with_their_number(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(LOG)
    done = workbench_diagnose("--log", log)
    assert done.returncode == 3, done.stderr
    told = done.stdout.splitlines()
    assert told[0] == (
        "line 2, and 1 more like it ([rank2], [rank0]; :4711, :4713): "
        "[rank2]: RuntimeError: Connection closed by peer [127.0.0.1]:4711"
    )
    assert told[1] == "line 5: [rank0]: RuntimeError: Connection reset by peer"
    assert told[2].startswith("    peer-dead: The connection to another rank ended")
    assert told[2].endswith("Read on: notebooks/07_xray.ipynb")
    assert told[3].startswith("line 6: ValueError: Global rank 0")
    assert told[4].startswith("    wrong-root: ")
    assert "Try: pass group_src= or group_dst=" in told[4]
    assert len(told) == 5


def test_a_log_comes_from_stdin_too_whatever_its_bytes_are() -> None:
    done = workbench_diagnose("--log", "-", "--json", text=b"\xff\xfe\n" + LOG.encode())
    assert done.returncode == 3, done.stderr
    document = json.loads(done.stdout)
    assert (document["schema"], document["lines"]) == (1, 7)
    found = [(k["code"], k["line"], k["count"], k["notebook"]) for k in document["known"]]
    assert found == [
        ("gloo-peer", 3, 2, "07_xray"),
        ("gloo-peer", 6, 1, "07_xray"),
        ("not-in-group", 7, 1, "01_subgroup_rank_mapping"),
    ]
    assert document["known"][0]["differs"] == [["[rank2]", "[rank0]"], [":4711", ":4713"]]


NCCL = "gpu1:{pid}:{pid} [{gpu}] NCCL WARN "
CONNECT = f"{NCCL}socketStartConnect: Connect to {{address}} failed : Software caused connection abort"
WORK = (
    "[rank{r}]:[E709 17:05:3{r}.16 ProcessGroupNCCL.cpp:632] [Rank {r}] Watchdog caught collective operation timeout: "
)


def told_of(*lines: str) -> list[tuple[int, int, tuple[tuple[str, ...], ...]]]:
    """Line, count and what differs, of each known line."""
    return [(known.line, known.count, known.differs) for known in explain_lines(lines).known]


def test_lines_of_one_meaning_in_other_words_are_told_apart() -> None:
    memory, bootstrap = NCCL.format(pid=1, gpu=0) + "Call to ibv_reg_mr failed", NCCL.format(pid=1, gpu=0) + "Bootstrap"
    log = explain_lines([memory, bootstrap, memory])
    assert [(k.line, k.count, k.explanation.code) for k in log.known] == [(1, 2, "nccl-warn"), (2, 1, "nccl-warn")]
    assert [line.partition(":")[0] for line in str(log).splitlines()] == [
        "line 1, and 1 more like it",
        "line 2",
        "    peer-exception",
    ]


def test_what_differs_between_folded_lines_is_shown() -> None:
    lines = [CONNECT.format(pid=i, gpu=0, address=f"10.0.0.{i}<379>") for i in (4, 5, 4)]
    assert told_of(*lines) == [(1, 3, (("10.0.0.4<379>", "10.0.0.5<379>"),))]
    work = [f"{WORK.format(r=r)}WorkNCCL(SeqNum=5, NumelIn={n}) ran for 6000{r} ms" for r, n in ((0, 4), (1, 8))]
    assert told_of(*work) == [(1, 2, (("[rank0]", "[rank1]"), ("NumelIn=4", "NumelIn=8")))]
    assert str(explain_lines(work)).startswith(
        "line 1, and 1 more like it ([rank0], [rank1]; NumelIn=4, NumelIn=8): [rank0]"
    )


def test_times_and_processes_alone_make_no_difference() -> None:
    stamped = [f"2026-11-30T08:4{i}:12.5Z pid={i} 0x7f{i} Broken pipe after 2{i} ms" for i in range(3)]
    assert told_of(*stamped) == [(1, 3, ())]


def test_many_values_and_many_wordings_are_cut_with_a_word() -> None:
    many = explain_lines([f"[rank{i}]: Broken pipe" for i in range(100)])
    assert len(many.known[0].differs[0]) == 64
    assert "([rank0], [rank1], [rank2], [rank3], [rank4], [rank5], [rank6], [rank7], ...)" in str(many)
    wordings = explain_lines([f"Broken pipe {'x' * (1 + i % 20)}" for i in range(40)])
    assert len(wordings.known) == 20
    lines = str(wordings).splitlines()
    assert (len(lines), lines[12]) == (14, "line 13 and later: 16 more in other words; --json has them")


def test_ranks_with_the_same_two_numbers_of_the_watchdog_are_told_together() -> None:
    status = "[rank{}]: PG status: last enqueued work: {}, last completed work: 4"
    log = explain_lines([status.format(0, 5), status.format(1, 4), status.format(2, 5)])
    assert [(k.line, k.count, k.differs) for k in log.known] == [(1, 2, (("[rank0]", "[rank2]"),)), (2, 1, ())]


def test_a_log_without_a_known_line_is_fine_and_one_that_is_not_there_is_bad_input(tmp_path: Path) -> None:
    quiet = tmp_path / "quiet.log"
    quiet.write_text("step 1\nstep 2\n")
    done = workbench_diagnose("--log", quiet)
    assert (done.returncode, done.stdout) == (0, "none of 2 lines is known\n")
    done = workbench_diagnose("--log", tmp_path / "missing.log")
    assert done.returncode == 2
    assert "missing.log cannot be read: No such file or directory" in done.stderr
    assert workbench_diagnose("--log", quiet, tmp_path).returncode == 2, "one thing at a time"


def test_a_directory_without_a_trace_is_bad_input_and_says_what_was_looked_for(tmp_path: Path) -> None:
    done = workbench_diagnose(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"no trace is there; looked for *.wbtrace in {tmp_path}" in done.stderr
    assert "`workbench trace --out`" in done.stderr


def test_a_trace_below_the_directory_is_read_and_two_of_them_are_refused_by_name(tmp_path: Path) -> None:
    """What was recorded is never passed over: the parent of a trace directory gives its verdict."""
    record_job(tmp_path / "runs" / "out" / "trace", "first", error_on=1)
    done = workbench_diagnose(tmp_path / "runs", "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["verdict"], document["world_size"]) == (3, "defect", 2)
    assert [(f["kind"], f["ranks"]) for f in document["findings"]] == [("peer-exception", [1])]
    record_job(tmp_path / "runs" / "again" / "trace", "second")
    done = workbench_diagnose(tmp_path / "runs", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    for name in ("out", "again"):
        assert str(tmp_path / "runs" / name / "trace") in done.stderr
    assert "are of different runs" in done.stderr


def test_jobs_of_one_command_below_the_directory_are_one_run(tmp_path: Path) -> None:
    record_job(tmp_path / "out" / "trace", "first")
    record_job(tmp_path / "out" / "trace", "second", error_on=0)
    document = json.loads(workbench_diagnose(tmp_path, "--json").stdout)
    assert [job["verdict"] for job in document["jobs"]] == ["ok", "defect"]


def test_a_trace_in_which_nothing_was_called_is_no_verdict_of_ok(tmp_path: Path) -> None:
    with Recorder.open(tmp_path, 0) as recorder:
        recorder.instant("exit", note="status=0")
    document = json.loads(workbench_diagnose(tmp_path, "--json").stdout)
    assert (document["verdict"], document["findings"]) == ("unknown", [])
    assert workbench_diagnose(tmp_path).stdout.startswith("nothing recorded: ")


@pytest.mark.parametrize(
    ("records", "verdict", "told"),
    [
        ((), "unknown", "which calls were made: the records of this job hold none"),
        (("exit",), "unknown", "which calls were made: the records of this job hold none"),
        (("all_reduce",), "ok", ""),
        (None, "unknown", "/trace is gone"),
    ],
)
def test_a_job_whose_records_hold_no_call_is_not_said_to_be_well(
    tmp_path: Path, records: tuple[str, ...] | None, verdict: str, told: str
) -> None:
    traces = tmp_path / "trace"
    if records is not None:
        with Recorder.open(traces, 0) as recorder:
            for op in records:
                recorder.instant(op)
    rank = subprocess.Popen(["sleep", "60"], env={"RANK": "0", "WORLD_SIZE": "1", "WORKBENCH_OBSERVE": str(traces)})
    try:
        view = look_at(rank.pid)
    finally:
        rank.kill()
        rank.wait(10)
    assert view.to_json()["verdict"] == verdict
    assert any(told in text for text in view.unseen) or not told
    assert str(view).startswith("no defect found so far\n" if verdict == "ok" else "verdict: unknown, since no call")


@pytest.mark.timeout(200)
def test_directories_of_two_runs_are_not_taken_for_two_nodes(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        record(tmp_path / name, torchrun("calls.py"))
    done = workbench_diagnose(tmp_path / "first", tmp_path / "second")
    assert (done.returncode, done.stdout) == (2, "")
    assert "are of different runs: torchrun's run ids are" in done.stderr
    for name in ("first", "second"):
        (tmp_path / name / "trace" / "jobs.jsonl").unlink()
    done = workbench_diagnose(tmp_path / "first", tmp_path / "second")
    assert "are of different runs: both hold world rank 0; " in done.stderr
    next((tmp_path / "first" / "trace").glob("*-00000.wbtrace")).unlink()
    next((tmp_path / "second" / "trace").glob("*-00001.wbtrace")).unlink()
    done = workbench_diagnose(tmp_path / "first", tmp_path / "second")
    assert "before the other began" in done.stderr


def test_stacks_that_all_stand_in_collectives_do_not_read_like_success() -> None:
    view = View(seen=(_seen(0, "all_reduce"), _seen(1, "barrier")), world_size=2)
    assert str(view).splitlines() == [
        "verdict: unknown, but every rank waits inside torch.distributed: if they still do in a minute, the job hangs. "
        "Calls that differ below are a hint; `workbench trace -- COMMAND` finds whose fault it is",
        "world rank 0: all_reduce called by step (train.py:7)",
        "world rank 1: barrier called by step (train.py:7)",
    ]
    assert view.to_json()["verdict"] == "unknown"


@pytest.mark.parametrize("world_size", [2, 3])
def test_where_a_rank_computes_or_is_not_seen_no_hang_is_claimed(world_size: int) -> None:
    view = View(seen=(_seen(0, "all_reduce"), _seen(1, "all_reduce" if world_size == 3 else "")), world_size=world_size)
    assert str(view).startswith("verdict: unknown, since no call was recorded; this is where the ranks stand\n")


def _seen(world_rank: int, call: str) -> Seen:
    library = (Frame(call, "/venv/site-packages/torch/distributed/distributed_c10d.py", 2),) if call else ()
    return Seen(
        pid=1, world_rank=world_rank, state="sleeping", cpu_s=1.0, stack=(*library, Frame("step", "train.py", 7))
    )
