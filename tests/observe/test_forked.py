"""A fork of a recorded rank is not that rank."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.observe.traced import begins, record
from tests.ports import free_port

FORKS = """
import os, torch, torch.distributed as dist
from torch.utils.data import DataLoader
dist.init_process_group("gloo")
if os.fork() == 0:
    try:
        dist.all_reduce(torch.ones(1), group=dist.GroupMember.NON_GROUP_MEMBER)  # does nothing, but is a call
    finally:
        os._exit(0)
os.wait()
print("RESULT 0", sum(x.item() for x in DataLoader(torch.arange(8), num_workers=2)), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_a_child_of_a_rank_writes_nothing_into_its_file(tmp_path: Path) -> None:
    (tmp_path / "forks.py").write_text(FORKS)
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    trace, output = record(tmp_path, [sys.executable, str(tmp_path / "forks.py")], **variables)
    assert "RESULT 0 28" in output
    ops = [e.op for e in begins(trace, 0) if e.op != "store_wait"]
    assert ops == ["init_process_group", "barrier", "destroy_process_group"]
    assert len(list((tmp_path / "trace").glob("*.wbtrace"))) == 1
