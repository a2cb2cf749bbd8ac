"""Flight-Recorder dumps out and in. Torch's own analyser reads what we write; what we read runs nothing."""

from __future__ import annotations

import json
import os
import pickle
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json
from torch.distributed.flight_recorder import fr_trace

from tests.forked import run_ranks
from tests.trace.made import call, group, trace
from workbench.trace import (
    Drops,
    Phase,
    Trace,
    TraceError,
    from_flight_recorder,
    load_dump,
    read_flight_recorder,
    rendezvous_lanes,
    to_flight_recorder,
    write_flight_recorder,
)

TP = group("tp", 0, 2)
TP_ODD = group("tp", 1, 3)
ALL = group("world", 0, 1, 2, 3)


def analyse(found: Trace, directory: Path, caplog: pytest.LogCaptureFixture) -> tuple[str, list[str]]:
    """What torch's analyser says about a trace: its log, and its table of collectives, one line each."""
    write_flight_recorder(found, directory)
    output = directory.parent / f"{directory.name}.out"
    caplog.clear()
    with caplog.at_level("INFO"):
        fr_trace.main([str(directory), "-o", str(output)])
    _, tables = pickle.loads(output.read_bytes())  # written by torch a moment ago
    lines = [
        f"{c.pg_desc} #{c.collective_seq_id} {c.collective_name} {'ok' if c.pass_check else 'bad'}"
        f" missing {sorted(c.missing_ranks or ())}"
        for c in tables.collectives
    ]
    return caplog.text, lines


def whole(*, skip: tuple[int, int] = (-1, -1)) -> Trace:
    """Three calls on each tp group and a fused one on all ranks; `skip` leaves out one (rank, sequence) of tp."""
    events = []
    for rank in range(4):
        tp = TP if rank in (0, 2) else TP_ODD
        for n in (1, 2, 3):
            if (rank, n) != skip:
                events += call(rank, tp, n, 10 * n, 10 * n + 5)
        events += call(rank, ALL, 1, 50, 60, op="all_reduce_add_rms_norm", path="shm")
    return trace(events, ranks=range(4))


def test_torchfrtrace_matches_every_call_of_a_healthy_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log, collectives = analyse(whole(), tmp_path / "dumps", caplog)
    assert sorted(collectives) == [
        "tp[0,2]:tp #1 nccl:all_reduce ok missing []",
        "tp[0,2]:tp #2 nccl:all_reduce ok missing []",
        "tp[0,2]:tp #3 nccl:all_reduce ok missing []",
        "tp[1,3]:tp #1 nccl:all_reduce ok missing []",
        "tp[1,3]:tp #2 nccl:all_reduce ok missing []",
        "tp[1,3]:tp #3 nccl:all_reduce ok missing []",
        "world[0,1,2,3]:world #1 nccl:all_reduce ok missing []",
    ]
    assert "Not all ranks" not in log


def test_torchfrtrace_names_the_rank_that_never_came(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log, collectives = analyse(whole(skip=(3, 3)), tmp_path / "dumps", caplog)
    assert "tp[1,3]:tp #3 nccl:all_reduce ok missing [3]" in collectives
    assert re.search(r"Not all ranks joining collective, sequence number: 3", log)
    assert "missing ranks: {3}" in log
    assert "decode at model.py:41" in log


def test_torchfrtrace_names_other_sizes_and_types(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    events = call(0, TP, 1, 0, 9, shape=(8, 64)) + call(2, TP, 1, 0, 9, shape=(4, 64))
    log, _ = analyse(trace(events, ranks=(0, 2)), tmp_path / "sizes", caplog)
    assert "SIZE_OR_SYNTAX_MISMATCH" in log
    events = call(0, TP, 1, 0, 9, op="all_reduce") + call(2, TP, 1, 0, 9, op="broadcast")
    log, _ = analyse(trace(events, ranks=(0, 2)), tmp_path / "types", caplog)
    assert "COLLECTIVE_TYPE_MISMATCH" in log


@pytest.mark.parametrize(
    "op", ["all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "store_wait", "barrier"]
)
def test_every_sort_of_call_is_accepted(tmp_path: Path, caplog: pytest.LogCaptureFixture, op: str) -> None:
    shape = None if op in ("wait", "barrier") else (8, 6)
    events = call(0, TP, 1, 0, 9, op=op, shape=shape) + call(2, TP, 1, 0, 9, op=op, shape=shape)
    log, collectives = analyse(trace(events, ranks=(0, 2)), tmp_path / "dumps", caplog)
    assert "ok missing []" in collectives[0]
    assert "Error type" not in log


def test_a_wrapped_ring_is_cut_where_all_members_still_have_the_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events = [e for n in range(1, 9) for e in call(0, TP, n, 10 * n, 10 * n + 5)]
    events += [e for n in range(5, 9) for e in call(2, TP, n, 10 * n, 10 * n + 5)]
    found = trace(events, ranks=(0, 2), drops={2: Drops(total=8, by_group=((TP, 8),))})
    log, collectives = analyse(found, tmp_path / "dumps", caplog)
    assert collectives == [f"tp[0,2]:tp #{n} nccl:all_reduce ok missing []" for n in (5, 6, 7, 8)]
    assert "Not all ranks" not in log


def test_a_rank_that_opened_a_group_and_never_called_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = trace(call(0, TP, 1, 0), ranks=(0, 2), groups=(TP,))
    log, _ = analyse(found, tmp_path / "dumps", caplog)
    assert "missing ranks: {2}" in log


def test_what_a_dump_cannot_say_stands_beside_it() -> None:
    events = call(0, TP, 1, 0, 9, op="broadcast", root_group_rank=1, root_world_rank=2, path="nccl", capture=True)
    (entry,) = to_flight_recorder(trace(events, ranks=(0,)))[0]["entries"]
    assert entry["workbench"] == {
        "op": "broadcast",
        "label": "tp",
        "ordinal": 1,
        "root_group_rank": 1,
        "root_world_rank": 2,
        "reduce_op": "sum",
        "stride_class": None,
        "path": "nccl",
        "capture": True,
    }


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_our_own_dumps_come_back_as_the_same_calls(tmp_path: Path, form: str) -> None:
    before = whole(skip=(3, 3))
    if form == "pickle":
        write_flight_recorder(before, tmp_path)
    else:
        for rank, dump in to_flight_recorder(before).items():
            (tmp_path / f"trace_rank_{rank}.json").write_text(json.dumps(dump))
    after = read_flight_recorder(tmp_path)
    strip = [(str(e), e.time_ns, e.sequence, e.group) for e in before.events]
    assert [(str(e), e.time_ns, e.sequence, e.group) for e in after.events] == strip
    assert [c.missing for c in rendezvous_lanes(after).calls if c.missing] == [(3,)]


def test_dumps_of_real_gloo_ranks_show_who_has_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "100")  # its name before torch 2.12
    json_dir, pickle_dir = tmp_path / "json", tmp_path / "pickle"
    json_dir.mkdir()
    pickle_dir.mkdir()

    def rank(world_rank: int) -> None:
        dist.init_process_group("gloo")
        tp = dist.new_group([0, 1], group_desc="tp")
        dist.all_reduce(torch.ones(3, 4, dtype=torch.bfloat16))
        retire_by = time.monotonic() + 5  # gloo notes the end a moment after wait() returns; some torch record nothing
        while time.monotonic() < retire_by and not all(
            e["retired"] for e in json.loads(_dump_fr_trace_json()).get("entries", [])
        ):
            time.sleep(0.01)
        work = dist.all_reduce(torch.ones(5), group=tp, async_op=True) if world_rank == 0 else None
        (json_dir / f"dump_{world_rank}").write_bytes(_dump_fr_trace_json())
        (pickle_dir / f"dump_{world_rank}").write_bytes(_dump_fr_trace())
        deadline = time.monotonic() + 20
        while len(list(pickle_dir.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        work = work or dist.all_reduce(torch.ones(5), group=tp, async_op=True)
        work.wait()

    run_ranks(2, rank)
    if not json.loads((json_dir / "dump_0").read_bytes())["entries"]:
        pytest.skip("this torch does not record gloo")
    for directory in (json_dir, pickle_dir):
        found = read_flight_recorder(directory, groups={"tp": (0, 1)})
        first, second = rendezvous_lanes(found).calls
        assert (str(first), first.waiting, first.missing) == ("all_reduce #1 on default_pg[0,1]", (), ())
        assert (str(second), second.waiting, second.missing) == ("all_reduce #1 on tp[0,1]", (0,), (1,))
        begin = found.ranks[0].events[0]
        assert (begin.phase, begin.shape, begin.dtype) == (Phase.BEGIN, (3, 4), "bfloat16")
        assert found.ranks[0].events[1].note == "finished at a time the dump does not say"
    site = read_flight_recorder(pickle_dir).ranks[0].events[0].site
    assert site is not None
    assert (site.file, site.function) == (__file__, "rank")


def test_without_a_table_the_members_of_a_group_are_those_that_used_it() -> None:
    entry = {
        "process_group": ["7", "undefined"],
        "profiling_name": "gloo:all_reduce",
        "collective_seq_id": 1,
        "time_created_ns": 5,
    }
    dump = {"version": "2.10", "entries": [entry], "pg_config": {"": {"ranks": "[]"}}}
    found = from_flight_recorder({0: dump, 1: {**dump, "entries": []}, 2: dump})
    assert [str(e.group) for e in found.events] == ["pg7[0,2]", "pg7[0,2]"]


def test_point_to_point_entries_name_the_peer_as_world_rank() -> None:
    entry = {
        "process_group": ["7", "pp"],
        "profiling_name": "nccl:send 0->1",
        "is_p2p": True,
        "p2p_seq_id": 3,
        "time_created_ns": 5,
        "time_discovered_completed_ns": 9,
    }
    dump = {"version": "2.10", "entries": [entry], "pg_config": {"7": {"ranks": "[4, 6]"}}}
    begin, end = from_flight_recorder({4: dump}).events
    assert (begin.op, begin.peer_world_rank, begin.sequence, end.time_ns) == ("send", 6, 3, 9)


class Evil:
    """Would write a file if it were unpickled freely."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch /tmp/workbench-was-here",)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (pickle.dumps({"entries": [Evil()]}), "more than plain data"),
        (pickle.dumps({"entries": {1, 2}}), "more than plain data"),
        (b"\x80\x02}r\xff\xff\xff\x7f.", "no list of entries"),  # a memo place of 2 billion
        (b"\x80\x02" + b"(" * 50 + b".", "damaged"),
        (b"\x80\x02]" + b"\x85" * 100_000 + b"}\x86.", "no list of entries"),
        (b"\x80\x02}]\x85K\x01s.", "a list for a key"),
        (b"\x80\x02}", "no end|pickle exhausted"),
        (b"\x80\x02]K\x01K\x02s.", "damaged"),
        (b"\x80\x02h\x05.", "damaged"),
        (b"{", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b"{}", "no list of entries"),
        (b'{"entries": [], "version": "3.1"}', "version '3.1'"),
        (b'{"entries": [], "version": [1]}', "version list"),
        (b"", "JSON"),
    ],
)
def test_a_hostile_dump_is_refused_and_runs_nothing(data: bytes, found: str) -> None:
    with pytest.raises(TraceError, match=found):
        load_dump(data)
    assert not Path("/tmp/workbench-was-here").exists()


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"process_group": "tp"},
        {"process_group": ["0", 1]},
        {"process_group": ["0", "tp"], "profiling_name": 7},
        {"process_group": ["0", "tp"], "profiling_name": "gloo:x", "collective_seq_id": "1"},
        {"process_group": ["0", "tp"], "profiling_name": "gloo:x", "collective_seq_id": 1, "time_created_ns": None},
    ],
)
def test_an_entry_of_another_form_is_refused(entry: dict[str, object]) -> None:
    with pytest.raises(TraceError, match="an entry's"):
        from_flight_recorder({0: {"version": "2.10", "entries": [entry]}})


def test_a_directory_is_read_by_the_number_at_the_end_of_each_name(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no Flight Recorder dump in"):
        read_flight_recorder(tmp_path)
    (tmp_path / "README").write_text("notes")
    (tmp_path / "node7-trace_3.json").write_text(json.dumps({"version": "2.10", "entries": []}))
    assert read_flight_recorder(tmp_path).world_ranks == (3,)
    (tmp_path / "node7-trace_4").write_text("junk")
    with pytest.raises(TraceError, match="node7-trace_4: neither a JSON dump nor a plain pickle"):
        read_flight_recorder(tmp_path)
