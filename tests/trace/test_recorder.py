"""The recorder and its file. Pinned: what is written is read back, whatever happens to the writer; bounds; privacy.

Only a default: the file's size. Cost is printed by benchmarks/trace.py and asserted nowhere.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.forked import run_outcomes
from workbench.errors import ArgumentError
from workbench.ranks import GroupKey
from workbench.trace import GroupInfo, Phase, Recorder, TraceError, read_directory, read_progress, read_rank

TP1 = GroupKey("tp", (4, 6, 5, 7))
SMALL = 64 << 10


def test_every_field_of_a_call_is_read_back(tmp_path: Path) -> None:
    with Recorder.open(tmp_path, 6, monotonic_ns=iter(range(100, 200)).__next__, wall_ns=lambda: 5_000) as rec:
        lane = rec.group(TP1, label="attention tp", ordinal=3, generation=2)
        token = lane.begin(
            "broadcast",
            shape=(128, 4096),
            dtype="bfloat16",
            path="shm",
            reduce_op="sum",
            root_group_rank=1,
            stride_class="dense(1,0)",
            capture=True,
            note="layer 7",
        )
        lane.end(token, error="RuntimeError: peer closed")
    found = read_rank(tmp_path / "rank-00006.wbtrace")
    begin, end = found.events
    assert (begin.phase, begin.op, begin.sequence) == (Phase.BEGIN, "broadcast", 1)
    assert (begin.time_ns, begin.world_rank) == (101, 6)
    assert begin.group == GroupInfo(TP1, "attention tp", 3, 2)
    assert (begin.root_group_rank, begin.root_world_rank) == (1, 6)
    assert (begin.shape, begin.dtype, begin.path, begin.reduce_op) == ((128, 4096), "bfloat16", "shm", "sum")
    assert (begin.stride_class, begin.capture, begin.note, begin.error) == ("dense(1,0)", True, "layer 7", "")
    assert begin.site is not None
    assert begin.site.function == "test_every_field_of_a_call_is_read_back"
    assert begin.site.file == __file__
    assert (end.phase, end.sequence, end.op, end.error) == (Phase.END, 1, "broadcast", "RuntimeError: peer closed")
    assert (found.header.anchor_monotonic_ns, found.header.anchor_wall_ns, found.header.closed_ns) == (100, 5000, 103)
    assert found.drops.complete


def test_a_call_may_have_ended_before_its_end_is_recorded(tmp_path: Path) -> None:
    with Recorder.open(tmp_path, 6, monotonic_ns=iter(range(100, 200)).__next__, wall_ns=lambda: 5_000) as rec:
        first = rec.group(TP1).begin("all_reduce")
        second = rec.group(TP1).begin("all_reduce")
        rec.group(TP1).end(second)
        rec.group(TP1).end(first, time_ns=102)
    events = read_rank(tmp_path / "rank-00006.wbtrace").events
    assert [(e.phase.value, e.sequence, e.time_ns) for e in events] == [
        ("B", 1, 101),
        ("B", 2, 102),
        ("E", 2, 103),
        ("E", 1, 102),
    ]


def test_calls_are_counted_per_group_and_instants_carry_the_latest_number(tmp_path: Path) -> None:
    with Recorder.open(tmp_path, 0) as rec:
        a, b = rec.group(GroupKey("tp", (0, 1))), rec.group(GroupKey("ep", (0, 2)))
        a.instant("plan")
        for lane in (a, b, a):
            lane.end(lane.begin("all_reduce"))
        a.instant("fallback")
        rec.instant("session_open", note="8 ranks")
    events = read_rank(tmp_path / "rank-00000.wbtrace").events
    seen = [(e.phase.value, e.op, str(e.group), e.sequence) for e in events]
    assert seen == [
        ("I", "plan", "tp[0,1]", 0),
        ("B", "all_reduce", "tp[0,1]", 1),
        ("E", "all_reduce", "tp[0,1]", 1),
        ("B", "all_reduce", "ep[0,2]", 1),
        ("E", "all_reduce", "ep[0,2]", 1),
        ("B", "all_reduce", "tp[0,1]", 2),
        ("E", "all_reduce", "tp[0,1]", 2),
        ("I", "fallback", "tp[0,1]", 2),
        ("I", "session_open", "None", 0),
    ]


def test_point_to_point_calls_are_counted_per_peer_and_leave_the_group_count_alone(tmp_path: Path) -> None:
    with Recorder.open(tmp_path, 0) as rec:
        lane = rec.group(GroupKey("pp", (0, 1, 2)))
        for peer in (1, 2, 1):
            lane.end(lane.begin("send", peer_world_rank=peer))
        lane.end(lane.begin("barrier"))
    begins = [e for e in read_rank(tmp_path / "rank-00000.wbtrace").events if e.phase is Phase.BEGIN]
    assert [(e.op, e.peer_world_rank, e.sequence) for e in begins] == [
        ("send", 1, 1),
        ("send", 2, 1),
        ("send", 1, 2),
        ("barrier", None, 1),
    ]


def test_a_new_generation_counts_from_one_again(tmp_path: Path) -> None:
    with Recorder.open(tmp_path, 0) as rec:
        for generation in (0, 1):
            lane = rec.group(GroupKey("tp", (0, 1)), generation=generation)
            assert lane is rec.group(GroupKey("tp", (0, 1)), generation=generation)
            lane.end(lane.begin("all_reduce"))
    begins = read_rank(tmp_path / "rank-00000.wbtrace").events[::2]
    assert [(str(e.group), e.sequence) for e in begins] == [("tp[0,1]", 1), ("tp[0,1] generation 1", 1)]


def test_a_root_given_in_one_numbering_is_kept_in_both_unless_it_is_no_member(tmp_path: Path) -> None:
    with Recorder.open(tmp_path, 4) as rec:
        lane = rec.group(TP1)
        for roots in ({"root_group_rank": 2}, {"root_world_rank": 7}, {"root_world_rank": 2}, {"root_group_rank": 4}):
            lane.end(lane.begin("broadcast", **roots))
    begins = read_rank(tmp_path / "rank-00004.wbtrace").events[::2]
    assert [(e.root_group_rank, e.root_world_rank) for e in begins] == [(2, 5), (3, 7), (None, 2), (4, None)]


def test_the_ring_keeps_the_newest_events_and_counts_the_rest_by_group(tmp_path: Path) -> None:
    with Recorder.open(tmp_path, 0, size_bytes=SMALL) as rec:
        old, busy = rec.group(GroupKey("tp", (0, 1))), rec.group(GroupKey("ep", (0, 2)))
        for _ in range(5):
            old.end(old.begin("all_reduce"))
        rec.instant("ready")
        for _ in range(1000):
            busy.end(busy.begin("all_to_all"))
    found = read_rank(tmp_path / "rank-00000.wbtrace")
    places = (SMALL - 4096 - 4096 - 16384) // 80
    assert len(found.events) == places
    assert found.events[-1].sequence == 1000
    assert [e.ordinal for e in found.events] == list(range(2011 - places, 2011))
    assert found.drops.total == 2011 - places
    assert {str(g): n for g, n in found.drops.by_group} == {"tp[0,1]": 10, "ep[0,2]": 2000 - places, "None": 1}
    assert found.drops.damaged == 0
    assert not found.drops.complete


def test_a_full_table_loses_names_with_a_count_and_no_exception(tmp_path: Path) -> None:
    with Recorder.open(tmp_path, 0, size_bytes=SMALL) as rec:
        lane = rec.group(GroupKey("tp", (0, 1)))
        lane.end(lane.begin("first"))
        for n in range(2000):
            rec.instant(f"operation number {n}")
        late = rec.group(GroupKey("late", (0, 3)))
        late.end(late.begin("first"))
    found = read_rank(tmp_path / "rank-00000.wbtrace")
    assert found.drops.table_lost > 1000
    assert found.events[-3].op == "?"
    assert (found.events[-1].op, str(found.events[-1].group)) == ("first", "late[0,3]")


def test_groups_beyond_the_last_counter_share_it_and_none_of_their_events_is_lost(tmp_path: Path) -> None:
    with Recorder.open(tmp_path, 0, size_bytes=900 << 10) as rec:  # counts 503 groups one by one
        for n in range(600):
            lane = rec.group(GroupKey("tp", (0, 1)), ordinal=n)
            lane.end(lane.begin("all_reduce"))
    path = tmp_path / "rank-00000.wbtrace"
    assert read_progress(path) == 1200
    found = read_rank(path)
    assert (len(found.events), found.drops.complete) == (1200, True)


def test_long_texts_are_kept_up_to_a_bound_and_say_that_they_were_cut(tmp_path: Path) -> None:
    with Recorder.open(tmp_path, 0) as rec:
        rec.instant("x", note="ä" * 100)
        rec.instant("y", error="e" * 10_000)
    x, y = read_rank(tmp_path / "rank-00000.wbtrace").events
    assert x.note == "ä" * 100
    assert y.error == "e" * (2816 - 17) + "... (10000 bytes)"


def test_what_a_killed_rank_recorded_is_read_without_its_help(tmp_path: Path) -> None:
    def rank(world_rank: int) -> None:
        lane = Recorder.open(tmp_path, world_rank).group(GroupKey("tp", (0, 1)))
        lane.end(lane.begin("all_reduce", shape=(4,)))
        lane.begin("all_reduce", shape=(8,))
        time.sleep(60)

    def read_while_they_hang_then_kill(pids: object) -> None:
        deadline = time.monotonic() + 20
        files = [tmp_path / f"rank-0000{r}.wbtrace" for r in (0, 1)]
        while not all(f.exists() and f.stat().st_size and _progress(f) == 3 for f in files):
            assert time.monotonic() < deadline, "the ranks did not record 3 events each"
            time.sleep(0.01)
        assert [str(e.shape) for e in read_rank(files[1]).events] == ["(4,)", "(4,)", "(8,)"]
        for pid in pids:  # type: ignore[attr-defined]  # a sequence of ints
            os.kill(pid, signal.SIGKILL)

    outcomes = run_outcomes(2, rank, while_running=read_while_they_hang_then_kill, timeout_s=30)
    assert [o.signal for o in outcomes] == [9, 9]
    trace = read_directory(tmp_path)
    assert trace.world_ranks == (0, 1)
    assert [(e.phase.value, e.sequence) for e in trace.ranks[0].events] == [("B", 1), ("E", 1), ("B", 2)]
    assert trace.ranks[0].header.closed_ns is None
    assert trace.complete
    assert trace.num_clocks == 1


def _progress(path: Path) -> int:
    try:
        return read_progress(path)
    except TraceError:  # its header is not there yet
        return -1


def test_a_forked_child_does_not_write_into_its_parents_file(tmp_path: Path) -> None:
    rec = Recorder.open(tmp_path, 0)
    lane = rec.group(GroupKey("tp", (0, 1)))
    token = lane.begin("all_reduce")
    pid = os.fork()
    if pid == 0:
        try:
            lane.end(token)
            rec.group(GroupKey("new", (0, 1))).begin("all_reduce")
            rec.instant("child")
            rec.close()
            os._exit(0 if not rec.enabled else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    lane.end(token, note="parent")
    found = read_rank(tmp_path / "rank-00000.wbtrace")
    assert [(e.phase.value, e.note) for e in found.events] == [("B", ""), ("E", "parent")]
    assert found.header.closed_ns is None
    rec.close()


def test_threads_may_record_at_once(tmp_path: Path) -> None:
    rec = Recorder.open(tmp_path, 0, size_bytes=1 << 20)
    lane = rec.group(GroupKey("tp", (0, 1)))

    def work(name: str) -> None:
        for n in range(500):
            lane.end(lane.begin("all_reduce", shape=(n,), path=name), note=f"{name} {n}")

    threads = [threading.Thread(target=work, args=(f"t{i}",)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    rec.close()
    found = read_rank(tmp_path / "rank-00000.wbtrace")
    assert found.drops.complete
    assert sorted(e.sequence for e in found.events if e.phase is Phase.BEGIN) == list(range(1, 2001))
    ends = [e for e in found.events if e.phase is Phase.END]
    assert all(e.shape is not None and e.note == f"{e.path} {e.shape[0]}" for e in ends)


def test_a_live_file_is_read_whole_while_it_is_being_written(tmp_path: Path) -> None:
    rec = Recorder.open(tmp_path, 0, size_bytes=SMALL)
    lane = rec.group(GroupKey("tp", (0, 1)))
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            lane.end(lane.begin("all_reduce", shape=(lane.latest + 1,)))

    writer = threading.Thread(target=work)
    writer.start()
    try:
        for _ in range(50):
            found = read_rank(tmp_path / "rank-00000.wbtrace")
            assert all(e.shape == (e.sequence,) or e.shape is None for e in found.events)
            assert found.drops.damaged <= 1
    finally:
        stop.set()
        writer.join(30)
        rec.close()


def test_files_are_private_and_hold_no_environment_value_or_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "sesame-4711")
    monkeypatch.setattr("sys.argv", ["serve", "--api-key=sesame-4711"])
    with Recorder.open(tmp_path / "new" / "deep", 0) as rec:
        rec.instant("session_open")
    path = tmp_path / "new" / "deep" / "rank-00000.wbtrace"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert b"sesame-4711" not in path.read_bytes()


def test_a_restarted_rank_gets_a_file_of_its_own_and_the_latest_attempt_is_read(tmp_path: Path) -> None:
    for op in ("first", "second"):
        with Recorder.open(tmp_path, 0) as rec:
            rec.instant(op)
    with Recorder.open(tmp_path, 1, attempt=1) as rec:
        rec.instant("second")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "rank-00000.1.wbtrace",
        "rank-00000.wbtrace",
        "rank-00001.1.wbtrace",
    ]
    latest, first = read_directory(tmp_path), read_directory(tmp_path, attempt=0)
    assert (latest.attempt, latest.attempts, latest.world_ranks) == (1, (0, 1), (0, 1))
    assert {e.op for e in latest.events} == {"second"}
    assert (first.world_ranks, [e.op for e in first.events]) == ((0,), ["first"])
    with pytest.raises(TraceError, match=r"no trace of attempt 7 in .*; found attempts 0, 1"):
        read_directory(tmp_path, attempt=7)
    with pytest.raises(FileExistsError):
        Recorder.open(tmp_path, 1, attempt=1)


def test_the_call_site_is_the_first_line_outside_the_package_and_torch(tmp_path: Path) -> None:
    with Recorder.open(tmp_path, 0) as rec, rec.group(GroupKey("tp", (0, 1))).span("all_reduce"):
        pass
    begin, end = read_rank(tmp_path / "rank-00000.wbtrace").events
    assert begin.site is not None
    assert (begin.site.function, begin.site.file) == (
        "test_the_call_site_is_the_first_line_outside_the_package_and_torch",
        __file__,
    )
    assert end.site == begin.site


def test_a_span_records_what_was_raised_and_lets_it_through(tmp_path: Path) -> None:
    with Recorder.open(tmp_path, 0) as rec:
        lane = rec.group(GroupKey("tp", (0, 1)))
        with pytest.raises(RuntimeError, match="peer closed"), lane.span("all_reduce"):
            raise RuntimeError("peer closed")
    assert read_rank(tmp_path / "rank-00000.wbtrace").events[1].error == "RuntimeError: peer closed"


def test_a_wait_of_no_group_is_a_span_of_its_own(tmp_path: Path) -> None:
    with Recorder.open(tmp_path, 0) as rec, rec.span("store_wait", note="key wb/tp/0"):
        pass
    begin, end = read_rank(tmp_path / "rank-00000.wbtrace").events
    assert (begin.op, begin.group, begin.note, end.phase) == ("store_wait", None, "key wb/tp/0", Phase.END)


def test_reading_and_recording_need_no_torch() -> None:
    code = "import sys, workbench.trace; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_off_and_closed_recorders_take_every_call_and_write_nothing(tmp_path: Path) -> None:
    closed = Recorder.open(tmp_path, 0)
    closed.group(GroupKey("tp", (0, 1)))
    closed.close()
    for rec in (Recorder.off(), closed):
        lane = rec.group(GroupKey("tp", (0, 1)), label="tp", ordinal=1)
        token = lane.begin("all_reduce", shape=(4,))
        assert token is None
        lane.end(token)
        lane.instant("plan")
        rec.instant("session_open", note="x")
        rec.end(rec.begin("wait"))
        rec.declare("{}")
        rec.close()
        assert not rec.enabled
    assert Recorder.off().path is None
    assert read_rank(tmp_path / "rank-00000.wbtrace").events == ()


def test_odd_arguments_are_recorded_as_well_as_they_can_be(tmp_path: Path) -> None:
    class Symbol:
        """Stands for the size of a dim while torch compiles: no number."""

    with Recorder.open(tmp_path, 0) as rec:
        lane = rec.group(GroupKey("tp", (0, 1)))
        lane.end(lane.begin("all_reduce", shape=[2, Symbol()], dtype=Phase.END))  # type: ignore[arg-type]  # on purpose
    begin = read_rank(tmp_path / "rank-00000.wbtrace").events[0]
    assert (begin.shape, begin.dtype) == ((2, -1), "Phase.END")


def test_a_declared_map_and_unused_groups_are_kept(tmp_path: Path) -> None:
    with Recorder.open(tmp_path, 0) as rec:
        rec.declare('{"tp": [[0, 1]]}')
        rec.group(GroupKey("tp", (0, 1)), ordinal=1)
    found = read_rank(tmp_path / "rank-00000.wbtrace")
    assert found.declared == ('{"tp": [[0, 1]]}',)
    assert [(str(g), g.ordinal) for g in found.groups] == [("tp[0,1]", 1)]


@pytest.mark.parametrize(("rank", "size"), [(-1, 1 << 20), (0, 1000), (0, 1 << 40)])
def test_a_rank_or_size_that_cannot_be_is_refused(tmp_path: Path, rank: int, size: int) -> None:
    with pytest.raises(ArgumentError, match="allowed"):
        Recorder.open(tmp_path, rank, size_bytes=size)
    assert list(tmp_path.iterdir()) == []
