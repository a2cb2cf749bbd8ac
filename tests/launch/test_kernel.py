"""Pins what a notebook sees, with a real Jupyter kernel: %%ranks, live output, the stop button, output under test."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from tests.launch.conftest import measured

ROOT = Path(__file__).parent.parent.parent


@dataclass
class Answer:
    """What came back for one cell: streams, displays in their last form, and the error's lines."""

    stdout: str = ""
    displays: list[str] = field(default_factory=list)
    updates: int = 0
    error: str = ""
    times: list[float] = field(default_factory=list)


class Kernel:
    """A kernel and its client, as a notebook front end has them."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager = manager
        self.client = client

    def run(self, code: str, *, stop_after_s: float | None = None) -> Answer:
        answer = Answer()
        request = self.client.execute(code)
        if stop_after_s is not None:
            time.sleep(stop_after_s)
            self.manager.interrupt_kernel()
        started = time.monotonic()
        while True:
            message = self.client.get_iopub_msg(timeout=90)
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["header"]["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                answer.times.append(time.monotonic() - started)
                return answer
            if kind == "stream" and content["name"] == "stdout":
                answer.stdout += content["text"]
            elif kind in ("display_data", "execute_result"):
                answer.displays.append(content["data"]["text/plain"])
            elif kind == "update_display_data":
                answer.displays[-1] = content["data"]["text/plain"]
                answer.updates += 1
            elif kind == "error":
                answer.error = "\n".join(content["traceback"])


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    manager = KernelManager(kernel_name="python3")
    environment: dict[str, Any] = {
        k: v for k, v in os.environ.items() if k not in ("PYTEST_CURRENT_TEST", "WORKBENCH_TEST")
    }
    manager.start_kernel(env=environment, cwd=str(ROOT))
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=90)
        kernel = Kernel(manager, client)
        answer = kernel.run("from workbench import Cluster\ncluster = Cluster(ranks=2, device='cpu')\ncluster")
        assert "2 ranks on cpu, idle, generation 0" in answer.displays[0], answer.error
        yield kernel
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_a_cell_on_ranks_shows_equal_lines_once_and_rewrites_them_live(kernel: Kernel) -> None:
    answer = kernel.run("%%ranks\nimport time\nprint('a')\ntime.sleep(0.3)\nprint('b', rank)\ntime.sleep(0.3)\n7")
    assert answer.displays == ["[0-1] a\n[0] b 0\n[1] b 1\n[0-1] 7"]
    assert answer.updates >= 2
    assert answer.error == ""


def test_chosen_ranks_and_a_wrong_line(kernel: Kernel) -> None:
    assert kernel.run("%%ranks 1\nrank").displays == ["[1] 1"]
    assert kernel.run("%%ranks tp:0\nrank").error.startswith("ArgumentError: ranks='tp:0' names a kind")


def test_the_stop_button_brings_a_hung_cell_back_and_the_ranks_live(kernel: Kernel) -> None:
    pids = kernel.run("cluster.status.pids").displays
    answer = kernel.run("%%ranks\nif rank == 1:\n    dist.barrier()", stop_after_s=1)
    assert answer.error.startswith("KeyboardInterrupt: interrupted: world rank 1;")
    assert measured("from the stop button to the prompt", answer.times[-1]) < 5
    assert kernel.run("cluster.rebuild()\ncluster.status.pids").displays == pids
    assert kernel.run("%%ranks\nx = torch.ones(1)\ndist.all_reduce(x)\nx").displays == ["[0-1] tensor([2.])"]


def test_a_deadline_in_a_cell_shows_no_frames_of_the_driver(kernel: Kernel) -> None:
    answer = kernel.run("%%ranks --deadline 0.5\nif rank == 1:\n    dist.barrier()")
    assert "CellDeadlineError" in answer.error
    assert "missing: 0" in answer.error
    assert "line 2: dist.barrier()" in answer.error
    assert "site-packages/ipyparallel" not in answer.error
    assert "barrier" in kernel.run("%where").stdout
    kernel.run("cluster.rebuild()")


def test_a_function_of_the_notebook_is_told_by_its_line_in_the_cell(kernel: Kernel) -> None:
    failed = kernel.run("def half(n):\n    return 1 / n\ncluster.run(half, 0)").error
    assert "cell, line 2 in half\n    return 1 / n\nZeroDivisionError" in failed
    stuck = kernel.run("def wait():\n    import time\n    time.sleep(60)\ncluster.run(wait, deadline_s=0.5)").error
    assert "cell, in wait, line 3: time.sleep(60)" in stuck
    assert "ipykernel_" not in failed + stuck
    kernel.run("cluster.interrupt()")


def test_under_test_the_output_comes_once_sorted_and_without_colours(kernel: Kernel) -> None:
    kernel.run("import os; os.environ['WORKBENCH_TEST'] = '1'")
    answer = kernel.run(
        "%%ranks\nimport time\ntime.sleep(0.2 * (1 - rank))\nprint('late is rank 0', rank)\nprint('both')"
    )
    kernel.run("del os.environ['WORKBENCH_TEST']")
    assert answer.stdout == "[0] late is rank 0 0\n[1] late is rank 0 1\n[0-1] both\n"
    assert answer.displays == []
    assert "\x1b" not in answer.stdout


def test_a_restarted_kernel_leaves_no_rank_behind(kernel: Kernel) -> None:
    """Last of this module: it takes the cluster away."""
    pids = [int(p) for p in kernel.run("print(*cluster.status.pids)").stdout.split()]
    kernel.manager.restart_kernel(now=True)
    kernel.client.wait_for_ready(timeout=90)
    deadline = time.monotonic() + 30
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, pids))
    assert kernel.run("from workbench import Cluster\nCluster.find()").displays[0].startswith("(")
