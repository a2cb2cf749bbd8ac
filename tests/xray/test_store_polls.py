"""Pins that a wait for a key that is begun again whenever it runs out is one wait, and that it is noticed as one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.observe.traced import Traced, torchrun, workbench_trace
from workbench.trace import Event, Phase

AGAIN = "by asking again and again; weights/ready"


def _asked(traced: Traced) -> list[Event]:
    return [e for e in traced.trace.events if e.op == "store_wait" and e.world_rank == 0 and "default_pg" not in e.note]


@pytest.mark.parametrize("way", ["written", "gives-up"])
def test_a_program_that_asks_a_store_again_and_again_and_goes_on_is_no_defect(tmp_path: Path, way: str) -> None:
    traced = workbench_trace(tmp_path, torchrun("store_polls.py", way), deadline_s=10)
    assert (traced.status, traced.document["verdict"]) == (0, "ok"), traced.stderr
    (first, ran_out, again, done) = _asked(traced)
    assert (first.phase, first.note) == (Phase.BEGIN, "weights/ready")
    assert "timeout" in ran_out.error
    assert (again.phase, again.note) == (Phase.BEGIN, AGAIN)
    assert (done.phase, done.error) == (Phase.END, "")
    total = next(e for e in traced.trace.events if e.world_rank == 0 and e.op == "all_reduce")
    assert done.time_ns < total.time_ns, "answered, or given up two seconds after it asked last"


def test_a_key_that_nobody_writes_is_told_though_the_wait_is_begun_anew_four_times_a_second(tmp_path: Path) -> None:
    traced = workbench_trace(tmp_path, torchrun("store_polls.py", "never"), deadline_s=5)
    first = traced.document["findings"][0]
    assert (traced.status, first["kind"], first["ranks"]) == (3, "store-timeout", [0]), traced.stderr
    assert "world rank 0 waits for weights/ready, which nobody wrote" in first["message"]
    assert len(_asked(traced)) == 3


def test_a_barrier_of_the_store_that_polls_every_ten_seconds_is_no_progress(tmp_path: Path) -> None:
    program = tmp_path / "late.py"
    program.write_text(
        "import time, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "time.sleep(1000 * dist.get_rank())\n"
        "dist.new_group([0])\n"
    )
    command = torchrun(program)
    traced = workbench_trace(tmp_path, command, deadline_s=13, TORCH_DIST_INIT_BARRIER="1")
    first = traced.document["findings"][0]
    assert (traced.status, first["kind"], first["ranks"]) == (3, "rendezvous-partial", [1]), traced.stderr
