"""The same programs as their users start them: `workbench trace -- torchrun ...`, from the command line to its JSON.

Exact: exit status, verdict, kind and ranks of the first finding. Ten programs, one of each way to go wrong; two twins.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bugs.run_program import PROGRAMS
from tests.bugs.test_programs import FAULTY

NAMES = (
    "v01_root_outside_the_group",
    "v05_each_rank_makes_its_own_group",
    "v10_a_call_by_a_non_member",
    "v12_an_exchange_over_the_world",
    "v13_every_group_gets_the_first_ones_object",
    "v14_lengths_that_differ",
    "v18_sum_meets_max",
    "v23_every_rank_its_own_root",
    "f7_2_an_idle_rank_dies",
    "w03_one_rank_is_killed",
)
RANKS = dict(FAULTY.keys())


def _trace(name: str, num_ranks: int, directory: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Status, document and what was printed of one run of the command."""
    document = directory / "verdict.json"
    command = [sys.executable, "-m", "workbench", "trace", "--deadline", "4", "--out", str(directory / "out")]
    command += ["--json", str(document), "--", sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--monitor-interval", "1"]  # on a busy machine: ranks that raise alike all come to it
    command += ["--nproc-per-node", str(num_ranks), str(PROGRAMS / f"{name}.py"), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, env=environment)
    return done.returncode, json.loads(document.read_text()), done.stdout + done.stderr


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", NAMES)
def test_the_command_says_what_is_wrong(name: str, tmp_path: Path) -> None:
    num_ranks = RANKS[name]
    kind, ranks, words = FAULTY[name, num_ranks]
    status, document, printed = _trace(name, num_ranks, tmp_path)
    assert (status, document["verdict"]) == (3, "defect"), printed
    first = document["findings"][0]
    assert (first["kind"], first["ranks"]) == (kind, list(ranks)), printed
    assert words in first["message"]
    assert document["world_size"] == num_ranks
    assert f"first cause: {kind}" in printed


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", ["v05_each_rank_makes_its_own_group", "f7_1_ahead_with_dummy_batches"])
def test_the_command_finds_nothing_in_a_twin_and_exits_as_it_does(name: str, tmp_path: Path) -> None:
    status, document, printed = _trace(name, RANKS[name], tmp_path, "--correct")
    assert (status, document["verdict"], document["command_status"]) == (0, "ok", 0), printed
    assert document["findings"] == []
