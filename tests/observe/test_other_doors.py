"""Futures, loops around is_completed, DistributedDataParallel's hooks, compiled code and RPC: the same results, nothing
found where all is well.

Exact: results, findings. Who waits for a future is not seen: a call whose future was taken counts as waited for.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.observe.traced import environment, results, torchrun, workbench_trace

DOORS = ("by_future", "by_asking", "by_hook", "by_compiler", "by_rpc")


@pytest.mark.timeout(200)
@pytest.mark.parametrize("door", DOORS)
def test_a_correct_program_runs_as_it_does_alone_and_nothing_is_found(tmp_path: Path, door: str) -> None:
    traced = workbench_trace(tmp_path, torchrun("other_doors.py", door))
    assert (traced.status, traced.document["verdict"]) == (0, "ok"), traced.stderr
    alone = subprocess.run(
        torchrun("other_doors.py", door), env=environment(), capture_output=True, text=True, timeout=100, check=True
    )
    assert results(traced.stdout) == results(alone.stdout)
    assert len(results(alone.stdout)) == 2


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("door", "function"),
    [("by_future", "by_future"), ("by_asking", "by_asking"), ("by_hook", "by_hook"), ("by_compiler", "summed")],
)
def test_who_stays_away_is_found_and_the_line_is_the_programs(tmp_path: Path, door: str, function: str) -> None:
    traced = workbench_trace(tmp_path, torchrun("other_doors.py", door, "bad"), deadline_s=4)
    first = traced.document["findings"][0]
    assert (first["kind"], first["ranks"]) == ("missing-call", [1]), traced.stderr
    assert re.match(rf"all_reduce in {function} \(\S*/other_doors\.py:\d+\), call #", first["message"])
