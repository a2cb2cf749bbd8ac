"""A server without requests: a rank waits for work, and the others in the call by which it hands the work on.

Exact: that it is ended all the same, and that the advice, in the document too, says how to let it wait.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.observe.traced import torchrun, workbench_trace

SERVER = """
import asyncio, multiprocessing, queue, select, socket, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
here, there = socket.socketpair()
ends = multiprocessing.Pipe()
WAITS = {
    "queue": lambda: queue.Queue().get(),
    "simple": lambda: queue.SimpleQueue().get(timeout=600),
    "pipe": lambda: ends[0].recv(),
    "select": lambda: select.select([here], [], []),
    "asyncio": lambda: asyncio.run(asyncio.sleep(600)),
}
dist.broadcast_object_list([1])
box = [WAITS[sys.argv[1]]() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(box)
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("way", ["queue", "simple", "pipe", "select", "asyncio"])
def test_of_a_rank_that_waits_for_work_it_is_said_how_to_let_it(tmp_path: Path, way: str) -> None:
    program = tmp_path / "server.py"
    program.write_text(SERVER)
    traced = workbench_trace(tmp_path, torchrun(program, way), deadline_s=3)
    first = traced.document["findings"][0]
    assert (traced.status, first["ranks"], first["certainty"]) == (3, [0], "likely"), traced.stderr
    assert first["fix"].endswith("waits for work by design, use --keep, or a larger --deadline")
    late = traced.stderr.splitlines()[-2]
    assert late.startswith("world rank 0 waits at server.py:"), traced.stderr
    assert late.endswith("; if it waits for work by design, use --keep, or a larger --deadline")


@pytest.mark.timeout(200)
def test_a_rank_that_sleeps_is_not_taken_for_a_server(tmp_path: Path) -> None:
    traced = workbench_trace(tmp_path, torchrun("hangs.py"), deadline_s=3)
    assert "by design" not in traced.document["findings"][0]["fix"]
    assert "by design" not in traced.stderr
