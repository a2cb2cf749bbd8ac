"""A job of which every rank waits to begin: nobody is absent, and it is judged and ended at the deadline too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.bugs.run_program import PROGRAMS as FAULTY
from tests.observe.traced import torchrun, workbench_trace

GETS_NO_GROUP = """
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
dist.init_process_group("gloo")
world = c10d._get_default_group()
if dist.get_rank() == 1:  # as if the ranks had made different numbers of groups before, where nobody saw it
    backend, store = c10d._world.pg_map[world]
    c10d._world.pg_map[world] = (backend, dist.PrefixStore("another", store))
dist.new_group([0, 1])
"""

EACH_ITS_OWN_PORT = """
import multiprocessing, socket, torch.distributed as dist
def rank(r):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=r, world_size=2)
if __name__ == "__main__":
    processes = [multiprocessing.get_context("spawn").Process(target=rank, args=(r,)) for r in range(2)]
    [p.start() for p in processes]
    [p.join() for p in processes]
"""


@pytest.mark.timeout(200)
def test_ranks_without_a_launcher_that_choose_a_port_each_are_told_as_one_fault(tmp_path: Path) -> None:
    program = tmp_path / "each_its_own_port.py"
    program.write_text(EACH_ITS_OWN_PORT)
    traced = workbench_trace(tmp_path, [sys.executable, str(program)], deadline_s=4)
    assert traced.status == 3, traced.stderr
    found = {f["job"]: f for f in traced.document["findings"]}
    assert {f["kind"] for f in found.values()} == {"rendezvous-partial"}
    assert {f["ranks"][0] for f in found.values()} == {0, 1}
    for finding in found.values():
        assert "They look for each other at different places" in finding["message"]
        assert "the same port" in finding["fix"]


@pytest.mark.timeout(200)
def test_ranks_that_all_wait_in_init_process_group_are_judged_and_ended(tmp_path: Path) -> None:
    traced = workbench_trace(tmp_path, torchrun(FAULTY / "w23_a_prefix_of_its_own.py"), deadline_s=4)
    assert (traced.status, traced.document["ended_at_deadline_s"]) == (3, 4), traced.stderr
    (finding,) = traced.document["findings"]
    assert (finding["kind"], finding["ranks"]) == ("rendezvous-partial", [0, 1])
    assert "world rank 0 meets at attempt-0 on " in finding["message"]
    assert "world rank 1: waiting, inside init_process_group #1 on world[0,1]" in traced.stderr


@pytest.mark.timeout(200)
def test_ranks_that_all_wait_in_new_group_are_judged_and_ended(tmp_path: Path) -> None:
    program = tmp_path / "gets_no_group.py"
    program.write_text(GETS_NO_GROUP)
    traced = workbench_trace(tmp_path, torchrun(program), deadline_s=4)
    assert (traced.status, traced.document["ended_at_deadline_s"]) == (3, 4), traced.stderr
    (finding,) = traced.document["findings"]
    assert (finding["kind"], finding["ranks"], finding["certainty"]) == ("stalled", [0, 1], "likely")
    assert "new_group in <module>" in finding["message"]
