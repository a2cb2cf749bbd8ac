"""Where a call was made: the program's line, also behind functions of torch, and no line where there is none."""

from __future__ import annotations

import pytest

from tests.observe.traced import PROGRAMS, begins, record, torchrun
from workbench.trace import Event


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    found, _ = record(tmp_path_factory.mktemp("lines"), torchrun("lines.py", ranks=1))
    return begins(found, 0)


def test_calls_that_torch_makes_for_several_lines_stand_each_at_its_own(events: list[Event]) -> None:
    lines = PROGRAMS.joinpath("lines.py").read_text().splitlines()
    inner = [e.site for e in events if e.op == "broadcast" and "inside broadcast_object_list" in e.note]
    assert [lines[s.line - 1].rpartition("# ")[2] for s in inner if s] == ["first"] * 4 + ["second"] * 2


def test_a_call_made_by_a_thread_without_a_line_of_python_is_recorded(events: list[Event]) -> None:
    assert [e.site for e in events if e.op == "barrier"] == [None]
