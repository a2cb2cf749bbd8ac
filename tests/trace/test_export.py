"""JSON lines and Chrome's format, and the JSON form of events."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trace.made import call, group, trace
from workbench.ranks import GroupKey
from workbench.trace import (
    CallSite,
    Drops,
    Event,
    GroupInfo,
    Phase,
    Recorder,
    TraceError,
    from_jsonl,
    read_directory,
    stride_class,
    to_chrome,
    to_jsonl,
)

TP = group("tp", 0, 2, 1)


@settings(max_examples=50, deadline=None)
@given(
    st.builds(
        Event,
        time_ns=st.integers(0, 1 << 62),
        world_rank=st.integers(0, 4096),
        phase=st.sampled_from(Phase),
        op=st.text(max_size=20),
        sequence=st.integers(0, 1 << 40),
        group=st.none() | st.just(TP),
        shape=st.none() | st.lists(st.integers(0, 1 << 20), max_size=4).map(tuple),
        dtype=st.none() | st.text(max_size=8),
        root_world_rank=st.none() | st.integers(0, 99),
        peer_world_rank=st.none() | st.integers(0, 99),
        capture=st.booleans(),
        site=st.none() | st.just(CallSite("f", "a.py", 3, (CallSite("g", "b.py", 4),))),
        note=st.text(max_size=20),
        error=st.text(max_size=20),
    )
)
def test_an_event_survives_json(event: Event) -> None:
    again = Event.from_json(json.loads(json.dumps(event.to_json())))
    assert (again, str(again)) == (event, str(event))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"phase": "X"}, "phase is B, E or I, found 'X'"),
        ({"time_ns": "soon"}, "time_ns is a whole number, found 'soon'"),
        ({"op": 3}, "op is a text, found 3"),
        ({"shape": [1, "2"]}, "shape is a list of whole numbers"),
        ({"site": {"function": "f", "file": "a.py", "line": 3, "callers": 4}}, "callers 4; expected a list of sites"),
        ({"group": []}, r"group is an object, found \[\]"),
        ({"group": {"kind": "tp", "world_ranks": [0]}}, "label is a text, found None"),
    ],
)
def test_an_event_of_another_form_is_refused_with_what_was_found(change: dict[str, object], found: str) -> None:
    data = Event(time_ns=1, world_rank=0, phase=Phase.BEGIN, op="x").to_json() | change
    with pytest.raises(TraceError, match=found):
        Event.from_json(data)


def test_an_event_prints_on_one_line() -> None:
    (begin,) = call(2, TP, 7, 1, None, path="shm", note="layer 3")
    assert str(begin) == ("rank 2 B all_reduce tp[0,2,1] #7 8x64 bfloat16 sum path=shm layer 3 at decode (model.py:41)")


def test_a_trace_survives_json_lines(tmp_path) -> None:
    for rank in (0, 1):
        with Recorder.open(tmp_path, rank, size_bytes=64 << 10) as rec:
            rec.declare('{"tp": [[0, 1]]}')
            lane = rec.group(GroupKey("tp", (0, 1)), label="tensor", ordinal=2)
            for n in range(500):
                lane.end(lane.begin("all_reduce", shape=(n, 2), dtype="float32", root_group_rank=1))
            rec.instant("fallback", note="nccl")
    trace = read_directory(tmp_path)
    assert trace.ranks[0].drops.total > 0
    text = to_jsonl(trace)
    assert from_jsonl(text) == trace
    assert from_jsonl(text) != from_jsonl(text.replace('"op": "fallback"', '"op": "other"', 1))
    last = json.loads(text.splitlines()[-1])
    assert (last["op"], last["note"], last["wall_ns"] > last["time_ns"]) == ("fallback", "nccl", True)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "no line"),
        ("{]", "line 1: "),
        ('{"schema": 2}', "line 1: schema 2, this version reads 1"),
        ('{"schema": 1}\n{"op": "x"}', "line 2: an event before the first rank"),
        ('{"schema": 1}\n{"header": 5}', "not a trace as JSON lines"),
        ('{"schema": 1}\n[]', "line 2"),
    ],
)
def test_other_lines_are_refused_with_their_number(text: str, found: str) -> None:
    with pytest.raises(TraceError, match=found):
        from_jsonl(text)


def test_chrome_gets_a_process_a_rank_a_thread_a_group_and_open_calls_as_begins() -> None:
    ep = group("ep", 0, 3)
    events = call(0, TP, 1, 10, 52) + call(0, ep, 1, 60) + call(2, TP, 1, 20, 52, error="RuntimeError: x")
    document = to_chrome(trace(events, ranks=(0, 2)))
    json.dumps(document)
    lines = document["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in lines if e["name"] == "thread_name"}
    assert names == {
        (0, 0): "no group",
        (0, 1): "tp[0,2,1]",
        (0, 2): "ep[0,3]",
        (2, 0): "no group",
        (2, 1): "tp[0,2,1]",
    }
    assert [e["args"]["name"] for e in lines if e["name"] == "process_name"] == [
        "rank 0 (node0, pid 100)",
        "rank 2 (node0, pid 102)",
    ]
    bars = [(e["ph"], e["pid"], e["tid"], e["ts"], e.get("dur")) for e in lines if e["ph"] in "XB"]
    assert bars == [("X", 0, 1, 0.0, 42.0), ("X", 2, 1, 10.0, 32.0), ("B", 0, 2, 50.0, None)]
    assert [e["args"]["error"] for e in lines if e["ph"] == "X" and e["pid"] == 2] == ["RuntimeError: x"]


def test_wide_groups_have_a_short_name_in_chrome() -> None:
    wide = GroupInfo(GroupKey("dp", tuple(range(64))), "dp", 1)
    lines = to_chrome(trace(call(0, wide, 1, 0, 1), ranks=(0,)))["traceEvents"]
    assert "dp[0,1,2,3,4,5,... 63 (64 ranks)]" in [e["args"].get("name") for e in lines]


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((), (), "contiguous"),
        ((4, 8), (8, 1), "contiguous"),
        ((4, 8), (1, 4), "dense(1,0)"),
        ((2, 3, 4), (12, 1, 3), "dense(0,2,1)"),
        ((1, 8), (99, 1), "contiguous"),
        ((4, 8), (16, 1), "strided"),
        ((4, 8), (0, 1), "strided"),
        ((4, 0), (1, 1), "contiguous"),
    ],
)
def test_stride_class_tells_dense_permutations_from_gaps(
    shape: tuple[int, ...], strides: tuple[int, ...], expected: str
) -> None:
    assert stride_class(shape, strides) == expected


def test_drops_are_found_by_group() -> None:
    drops = Drops(total=7, by_group=((TP, 4), (None, 3)))
    assert (drops.of(TP), drops.of(None), drops.of(group("ep", 0)), drops.complete) == (4, 3, 0, False)
