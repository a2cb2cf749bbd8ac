"""Pins that messages between two ranks are no calls of all, and that questions to a store beside them are no waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.observe.traced import torchrun, workbench_trace

BEGIN = """
import sys, threading, time
from datetime import timedelta
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, x = dist.get_rank(), torch.ones(4)
"""
CORRECT = {
    "objects of two, then a barrier of all": """
if rank == 0:
    dist.send_object_list([{"step": 1}], 1)
elif rank == 1:
    dist.recv_object_list([None], 0)
""",
    "a thread that looks whether it is to stop": """
def look(store):
    while True:
        try:
            return store.wait(["stop"], timedelta(seconds=0.3))
        except dist.DistStoreError:
            pass
looker = threading.Thread(target=look, args=(dist.distributed_c10d._get_default_store().clone(),))
looker.start()
time.sleep(7)
if rank == 0:
    dist.distributed_c10d._get_default_store().set("stop", "1")
looker.join()
""",
    "tags in another order": """
works = []
if rank == 0:
    works = [dist.isend(x, 1, tag=tag) for tag in (1, 2, 3)]
elif rank == 1:
    works = [dist.irecv(torch.ones(4), 0, tag=tag) for tag in (3, 1, 2)]
[work.wait() for work in works]
""",
}


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_program_is_no_defect(tmp_path: Path, name: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"{BEGIN}{CORRECT[name]}\ndist.barrier()\ndist.destroy_process_group()\n")
    traced = workbench_trace(tmp_path, torchrun(program, ranks=3), deadline_s=5)
    assert (traced.status, traced.document["verdict"]) == (0, "ok"), traced.stderr


def test_a_sender_that_waits_for_another_is_not_told_by_the_tag_of_what_it_sent_before(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"{BEGIN}"
        "if rank == 0:\n    early = dist.isend(x, 1, tag=99)\n    dist.recv(x, 2)\n    dist.send(x, 1, tag=3)\n"
        "elif rank == 1:\n    dist.recv(x, 0, tag=3)\nelse:\n    time.sleep(1000)\n"
    )
    traced = workbench_trace(tmp_path, torchrun(program, ranks=3), deadline_s=5)
    first = traced.document["findings"][0]
    assert (traced.status, first["kind"], first["ranks"]) == (3, "missing-call", [2]), traced.stderr
