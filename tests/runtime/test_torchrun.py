"""Pins that a plain script under plain torchrun works: no launcher of ours, no process group made beforehand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_a_plain_script_under_torchrun_is_exact_on_every_subgroup_of_four_ranks() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "4",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "127.0.0.1:0",
            "--local-addr",
            "127.0.0.1",
            "tests/runtime/torchrun_body.py",
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "WORKBENCH_DEVICE": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "20 checks exact and bit-equal on every rank, path cpu\n"
