"""Pins the record of a capture: stages by their operation or capture flag, open ends, errors, and its text twin."""

from __future__ import annotations

from workbench.ranks import GroupKey
from workbench.trace import Event, GroupInfo, Phase, Stage, capture_timeline
from workbench.views import timeline_figure, timeline_text

TP = GroupInfo(GroupKey("tp", (0, 1)), "tp", 0, 0)


def _event(time_ns: int, rank: int, phase: Phase, op: str, **fields) -> Event:
    return Event(time_ns=time_ns, world_rank=rank, phase=phase, op=op, **fields)


EVENTS = [
    _event(1000, 0, Phase.BEGIN, "capture"),
    _event(1500, 1, Phase.BEGIN, "capture"),
    _event(2000, 0, Phase.BEGIN, "all_reduce", group=TP, sequence=1, shape=(1, 8), capture=True),
    _event(2500, 0, Phase.END, "all_reduce", group=TP, sequence=1, shape=(1, 8), capture=True),
    _event(3000, 0, Phase.END, "capture", note="1 calls"),
    _event(4000, 1, Phase.END, "capture", error="CaptureError: counts"),
    _event(5000, 0, Phase.BEGIN, "replay"),
    _event(6000, 0, Phase.BEGIN, "barrier", group=TP, sequence=2),
]


def test_stages_are_told_apart_and_an_open_replay_has_no_end() -> None:
    timeline = capture_timeline(EVENTS)
    assert timeline is not None
    assert [(s.world_rank, s.stage, s.start_ns, s.end_ns) for s in timeline.spans] == [
        (0, Stage.CAPTURE, 1000, 3000),
        (1, Stage.CAPTURE, 1500, 4000),
        (0, Stage.CALL, 2000, 2500),
        (0, Stage.REPLAY, 5000, None),
    ]
    assert (timeline.world_ranks, timeline.start_ns, timeline.end_ns) == ((0, 1), 1000, 5000)
    assert timeline.spans[1].error == "CaptureError: counts"


def test_a_rank_that_comes_late_is_waited_for_at_the_door() -> None:
    """Rank 1 comes at 21 us, and both capture from 22 us on."""
    times = {0: (1000, 22_000), 1: (21_000, 22_100)}
    door = [_event(t, r, p, "capture_door") for r in times for t, p in zip(times[r], Phase, strict=False)]
    begun = [_event(times[r][1] + 50, r, Phase.BEGIN, "capture") for r in times]
    timeline = capture_timeline([*door, *begun])
    assert timeline is not None
    spans = [(s.world_rank, s.stage, s.end_ns and s.end_ns - s.start_ns) for s in timeline.spans]
    assert spans[:2] == [(0, Stage.DOOR, 21_000), (1, Stage.DOOR, 1_100)]
    assert timeline_text(timeline).splitlines()[1].startswith("+20 µs  world rank 1  waits at the door")


def test_nothing_captured_is_no_timeline() -> None:
    assert capture_timeline(EVENTS[-1:]) is None


def test_the_text_twin_says_what_the_picture_says() -> None:
    timeline = capture_timeline(EVENTS)
    text = timeline_text(timeline)
    lines = text.splitlines()
    assert len(lines) == 4
    assert "world rank 1  capture: capture" in lines[1]
    assert lines[1].endswith("failed: CaptureError: counts")
    assert "captured call: all_reduce [1, 8] on tp[0,1]" in lines[2]
    assert "never ended" in lines[3]
    figure = timeline_figure(timeline)
    assert [bar.name for bar in figure.data] == ["capture", "captured call", "replay"]
    assert sum(len(bar.y) for bar in figure.data) == 4
    assert figure.to_json() == timeline_figure(timeline).to_json()
