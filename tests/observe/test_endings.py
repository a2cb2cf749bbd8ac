"""How ranks end is recorded: exceptions with the line that raised them, exit statuses, signals."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.observe.traced import PROGRAMS, Traced, torchrun, workbench_diagnose, workbench_trace
from workbench.trace import Event


def ended(tmp_path: Path, how: str) -> tuple[Traced, list[Event], str]:
    """The run, world rank 1's exceptions, and its exit note."""
    traced = workbench_trace(tmp_path, torchrun("ends.py", how))
    rank = traced.trace.rank(1)
    assert rank is not None
    exits = [e.note for e in rank.events if e.op == "exit"]
    assert len(exits) == 1
    return traced, [e for e in rank.events if e.op == "exception"], exits[0]


def test_an_exception_nobody_catches_is_recorded_at_the_line_that_raised_it(tmp_path: Path) -> None:
    traced, exceptions, note = ended(tmp_path, "exception")
    assert [e.error for e in exceptions] == ["ValueError: no such expert: 7"]
    site = exceptions[0].site
    assert site is not None
    assert (site.function, Path(site.file).name, site.line) == ("end", "ends.py", 14)
    assert note == "status=1"
    assert traced.document["verdict"] == "defect"
    assert traced.document["findings"][0]["ranks"] == [1]
    assert "no such expert: 7" in traced.document["findings"][0]["message"]
    assert traced.status == 3
    assert traced.document["command_status"] == 1


@pytest.mark.parametrize(("how", "expected"), [("os_exit", "status=5, os._exit"), ("kill", "status=-9, signal 9")])
def test_an_end_without_a_word_is_recorded_too(tmp_path: Path, how: str, expected: str) -> None:
    traced, exceptions, note = ended(tmp_path, how)
    assert (exceptions, note) == ([], expected)
    assert traced.document["findings"][0]["ranks"] == [1]


def test_a_rank_that_asks_to_exit_is_told_with_the_line_and_the_text(tmp_path: Path) -> None:
    traced, exceptions, note = ended(tmp_path, "sys_exit")
    assert exceptions == []
    assert note.startswith("status=1, sys.exit in end (")
    first = traced.document["findings"][0]
    assert (first["kind"], first["ranks"]) == ("peer-dead", [1])
    assert "world rank 1 exited with status 1 by sys.exit in end (" in first["message"]
    assert "ends.py:16): no such config; its last call was barrier" in first["message"]
    assert '> ends.py:16: sys.exit("no such config")' in traced.stderr


def test_what_leaves_a_collective_is_an_exception_of_the_rank_it_left(tmp_path: Path) -> None:
    traced, _, _ = ended(tmp_path, "os_exit")
    rank = traced.trace.rank(0)
    assert rank is not None
    found = [e for e in rank.events if e.op == "exception"]
    assert len(found) == 1, "told once, though it also ended the program"
    assert found[0].error.startswith("RuntimeError: ")
    assert found[0].group is not None
    assert found[0].group.world_ranks == (0, 1)


@pytest.mark.parametrize("start", ["spawn", "fork"])
@pytest.mark.parametrize("how", ["wait", "daemon"])
def test_ranks_that_their_parent_ends_when_all_is_done_are_no_defect(tmp_path: Path, start: str, how: str) -> None:
    traced = workbench_trace(tmp_path, [sys.executable, str(PROGRAMS / "workers.py"), start, how])
    assert (traced.status, traced.document["verdict"]) == (0, "ok"), traced.stderr
    assert {e.note for e in traced.trace.events if e.op == "exit"} == {"status=-15, signal 15, shut down by its parent"}
    again = workbench_diagnose(traced.directory)
    assert again.returncode == 0, "the records alone say so too"


def test_a_rank_that_its_parent_ends_while_another_needs_it_is_told(tmp_path: Path) -> None:
    traced = workbench_trace(tmp_path, [sys.executable, str(PROGRAMS / "workers.py"), "fork", "too_early"])
    assert traced.document["findings"][0]["ranks"] == [1], traced.stderr
    assert "was ended by SIGTERM (15), which its parent sent" in traced.document["findings"][0]["message"]


def test_a_rank_that_was_gone_before_its_parent_signalled_it_was_not_ended_by_its_parent(tmp_path: Path) -> None:
    traced = workbench_trace(tmp_path, [sys.executable, str(PROGRAMS / "workers.py"), "fork", "killed"])
    first = traced.document["findings"][0]
    assert (first["kind"], first["ranks"]) == ("peer-dead", [1]), traced.stderr
    assert "was ended by SIGKILL (9)" in first["message"]
    assert "parent" not in first["message"]


@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_what_a_child_of_multiprocessing_raises_is_told_and_not_that_it_exits(tmp_path: Path, start: str) -> None:
    traced = workbench_trace(tmp_path, [sys.executable, str(PROGRAMS / "workers.py"), start, "raise"])
    first = traced.document["findings"][0]
    assert (first["kind"], first["ranks"]) == ("peer-exception", [1])
    assert re.search(r"raised ValueError: bad weights in load \(\S+workers\.py:20\)", first["message"])
