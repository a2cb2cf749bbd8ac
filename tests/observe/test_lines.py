"""Where a call was made: the program's line, also behind functions of torch, and no line where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.observe.traced import PROGRAMS, TORCHRUN, begins, record, torchrun
from workbench.trace import Event

WRAPPED = {
    "communicator.py": """
import torch.distributed as dist
def add_up(x):
    dist.all_reduce(x)
    return x
def tell(box):
    dist.broadcast_object_list(box, src=0)
""",
    "group.py": """
import communicator
def add(x):
    return also(x)
def also(x):
    return communicator.add_up(x)
""",
    "layer.py": """
import group, torch
class Layer(torch.nn.Module):
    def forward(self, x):
        return group.add(x)
    def twice(self, x):
        return group.add(self(x))
""",
    "wrapped.py": """
import torch, torch.distributed as dist
from communicator import add_up, tell
from layer import Layer
dist.init_process_group("gloo")
model = torch.nn.Sequential(Layer())
x = torch.ones(2)
for _ in range(2):
    model(x)
    model[0].twice(x)
    add_up(x)
    dist.all_reduce(x)
    tell([1])
    tell([2])
""",
}
"""A communicator behind a group behind a layer, as engines have them."""


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


def test_a_call_behind_wrappers_is_told_with_who_called_them(tmp_path: Path) -> None:
    for name, text in WRAPPED.items():
        (tmp_path / name).write_text(text)
    trace, _ = record(tmp_path, [*TORCHRUN, "1", str(tmp_path / "wrapped.py")])
    sums = [e.site for e in begins(trace, 0) if e.op == "all_reduce"]
    ways = [[f"{Path(s.file).name}:{s.line}" for s in (site, *site.callers)] for site in sums if site is not None]
    one_step = [
        ["communicator.py:4", "group.py:6", "layer.py:5", "wrapped.py:9"],
        ["communicator.py:4", "group.py:6", "layer.py:5", "wrapped.py:10"],
        ["communicator.py:4", "group.py:6", "layer.py:7", "wrapped.py:10"],
        ["communicator.py:4", "wrapped.py:11"],
        ["wrapped.py:12"],
    ]
    assert ways == one_step * 2
    assert len({site for site in sums if site is not None}) == 2, "two lines; who called them makes no difference"
    inner = [e.site for e in begins(trace, 0) if "inside broadcast_object_list" in e.note]
    lines = [caller.line for site in inner if site is not None for caller in site.callers]
    assert lines == [13, 13, 14, 14] * 2, "the steps of an object collective have the same callers"
    assert str(sums[3]).count(" from ") == 1
