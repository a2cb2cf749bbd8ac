"""A recorder that a process shares: what is opened without a directory of its own writes into the same file."""

from __future__ import annotations

from pathlib import Path

from workbench.ranks import GroupKey
from workbench.trace import Recorder, read_rank

GROUP = GroupKey("tp", (0, 1))


def test_what_borrows_the_recorder_writes_into_its_file_and_cannot_close_it(tmp_path: Path) -> None:
    with Recorder.open(tmp_path, 0) as recorder:
        recorder.share()
        with Recorder.shared() as borrowed:
            borrowed.group(GROUP).end(borrowed.group(GROUP).begin("all_reduce"))
        recorder.group(GROUP).end(recorder.group(GROUP).begin("all_reduce"))
        assert recorder.enabled
        assert recorder.path is not None
    events = read_rank(recorder.path).events
    assert [(e.op, e.phase.value, e.sequence) for e in events] == [
        ("all_reduce", "B", 1),
        ("all_reduce", "E", 1),
        ("all_reduce", "B", 2),
        ("all_reduce", "E", 2),
    ]


def test_a_recorder_that_was_closed_is_not_shared_any_more(tmp_path: Path) -> None:
    with Recorder.open(tmp_path, 0) as recorder:
        recorder.share()
    assert not Recorder.shared().enabled
