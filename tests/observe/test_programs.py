"""Programs not written here: they run the same, nothing is found in them, and no collective of theirs is missed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.observe.traced import PROGRAMS, begins, environment, record, results, torchrun, workbench_trace
from workbench.trace import pair_calls

# What each of two ranks must at least be seen to call: from Python, from C++ and through functional collectives.
EXPECTED = {
    "ddp.py": {"all_reduce": 2, "broadcast": 4},
    "fsdp2.py": {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 2},
    "pipeline.py": {"send": 4, "recv": 4},
    "tensor_parallel.py": {"all_reduce": 1, "scatter": 2},
    "with_accelerate.py": {"all_reduce": 2, "all_gather": 1, "barrier": 1},
    "with_lightning.py": {"all_reduce": 4, "barrier": 1},
}
NEEDS = {"with_accelerate.py": "accelerate", "with_lightning.py": "lightning"}
GROUPS = {"init_process_group", "new_group", "destroy_process_group"}


@pytest.mark.parametrize("program", EXPECTED)
def test_a_program_runs_the_same_and_its_collectives_are_recorded(tmp_path: Path, program: str) -> None:
    package = NEEDS.get(program)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; pip install '.[test]' brings it")
    command = torchrun(program)
    if program == "with_lightning.py":  # starts its ranks itself
        command = [sys.executable, str(PROGRAMS / program)]
    plain = subprocess.run(
        command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert plain.returncode == 0, plain.stderr
    traced = workbench_trace(tmp_path, command)
    assert traced.status == 0, traced.stderr
    assert results(traced.stdout) == results(plain.stdout)
    assert set(results(plain.stdout)) == {"0", "1"}
    assert traced.document == {
        "schema": 1,
        "verdict": "ok",
        "world_size": 2,
        "command_status": 0,
        "ended_at_deadline_s": None,
        "interrupted": False,
        "findings": [],
    }
    trace = traced.trace
    for rank in (0, 1):
        counts = Counter(e.op for e in begins(trace, rank))
        assert {op: min(counts[op], n) for op, n in EXPECTED[program].items()} == EXPECTED[program]
    assert [str(c.event) for c in pair_calls(trace.events) if c.end is None] == []


@pytest.mark.parametrize("program", ["ddp.py", "fsdp2.py", "tensor_parallel.py", "calls.py"])
def test_no_collective_is_missed_or_counted_twice(tmp_path: Path, program: str) -> None:
    """Against torch's Flight Recorder, which sees every collective that reaches a gloo group, and no send."""
    command = torchrun("flight.py", str(PROGRAMS / program), str(tmp_path))
    trace, _ = record(tmp_path, command, TORCH_FR_BUFFER_SIZE="2000")
    for rank in (0, 1):
        entries = json.loads((tmp_path / f"flight-{rank}.json").read_text())["entries"]
        torchs = Counter(e["process_group"][0] for e in entries)
        ours: Counter[str] = Counter()
        for event in begins(trace, rank):
            outer = event.op in GROUPS or event.op.endswith("_object_list")
            if event.group is not None and event.peer_world_rank is None and not outer:
                ours[event.group.label] += "non-member" not in event.note
        assert +ours == torchs
        assert sum(ours.values()) > 3
