"""Waits for calls that were only started are recorded; a program that starts none runs torch's own Work.wait."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.observe.traced import TORCHRUN, record

PROGRAM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(2)
dist.all_reduce(x)
print(type(vars(dist.Work)["wait"]).__name__)
work = dist.all_reduce(x, async_op=True)
print(type(vars(dist.Work)["wait"]).__name__)
work.wait()
dist.destroy_process_group()
"""


def test_waits_are_looked_at_from_the_first_call_on_that_is_only_started(tmp_path: Path) -> None:
    trace, told = record(tmp_path, [sys.executable, "-c", PROGRAM])
    assert told.split() == ["instancemethod", "function"], "what pybind11 made, then ours"
    waits = [(e.phase.value, e.note) for e in trace.events if e.op == "wait"]
    # 1 is init_process_group, 2 the all_reduce that torch itself waited for
    assert waits == [("B", "for all_reduce #3 on world[0]"), ("E", "")]


DESTROYS = """
import gc, os, weakref, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def threads(): return len(os.listdir("/proc/self/task"))
before = threads()
groups = [dist.new_group() for _ in range(5)]
for group in groups:
    dist.all_reduce(torch.ones(2), group=group)
print(threads() - before >= 5)
for group in groups:
    dist.destroy_process_group(group)
del group, groups
gc.collect()
print(threads() - before)
dist.destroy_process_group()
"""


def test_a_group_that_the_program_destroys_is_gone_with_its_threads(tmp_path: Path) -> None:
    trace, told = record(tmp_path, [sys.executable, "-c", DESTROYS])
    assert told.split() == ["True", "0"]
    calls = [(e.op, e.group.ordinal) for e in trace.events if e.phase.value == "B" and e.group]
    assert calls.count(("destroy_process_group", 5)) == 1


ASKS = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank():
    time.sleep(4)
work = dist.all_reduce(torch.ones(2), async_op=True)
if dist.get_rank() == 0:
    until = time.monotonic() + 2
    while time.monotonic() < until and not work.is_completed():
        time.sleep(0.01)
    time.sleep(1)
    work.is_completed()
work.wait()
dist.destroy_process_group()
"""


def test_asking_in_a_loop_is_a_wait_until_the_loop_is_left(tmp_path: Path) -> None:
    program = tmp_path / "asks.py"
    program.write_text(ASKS)
    trace, _ = record(tmp_path, [*TORCHRUN, "2", str(program)])
    of_rank_0 = [
        (e.phase.value, e.op, e.note if e.phase.value == "B" else "") for e in trace.events if not e.world_rank
    ]
    first = next(at for at, event in enumerate(of_rank_0) if event[:2] == ("B", "all_reduce"))
    wait = "for all_reduce #2 on world[0,1]"
    assert of_rank_0[first + 1 : first + 6] == [
        ("B", "wait", f"by asking again and again; {wait}"),
        ("E", "wait", ""),
        ("B", "wait", wait),
        ("E", "wait", ""),
        ("E", "all_reduce", ""),
    ]
