"""`workbench trace` on two GPUs: a call ends when its GPU has done it, captures show, a hang on a GPU is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda import HAS_GPUS, WHY_NOT
from tests.observe.traced import begins, results, torchrun, workbench_trace
from workbench.trace import pair_calls

pytestmark = pytest.mark.skipif(not HAS_GPUS, reason=WHY_NOT)


@pytest.mark.timeout(200)
def test_a_program_on_gpus_runs_the_same_and_every_call_ends(tmp_path: Path) -> None:
    traced = workbench_trace(tmp_path, torchrun("gpu_calls.py"), limit_s=180)
    assert (traced.status, traced.document["findings"]) == (0, []), traced.stderr
    assert results(traced.stdout) == {"0": "96.0", "1": "96.0"}
    calls = [(e.op, e.note, e.capture) for e in begins(traced.trace, 0) if e.op in ("all_reduce", "capture")]
    assert calls == [
        *[("all_reduce", "default group; on the GPU", False)] * 3,
        ("all_reduce", "default group; async; on the GPU", False),
        ("capture", "", False),
        ("all_reduce", "default group; on the GPU", True),
        ("all_reduce", "default group; on the GPU", False),
    ]
    assert [str(c.event) for c in pair_calls(traced.trace.events) if c.end is None] == []


@pytest.mark.timeout(200)
def test_a_rank_that_leaves_a_sum_out_on_the_gpu_is_found_though_no_call_blocks(tmp_path: Path) -> None:
    traced = workbench_trace(tmp_path, torchrun("gpu_calls.py", "hang"), deadline_s=15, limit_s=180)
    assert traced.status == 3, traced.stderr
    first = traced.document["findings"][0]
    assert (first["kind"], first["ranks"]) == ("missing-call", [1])
