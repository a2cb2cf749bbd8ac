"""Pins that the same Session runs on GPUs: bits equal to the CPU reference, and capture as a CUDA graph."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda import HAS_GPUS, WHY_NOT

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.skipif(not HAS_GPUS, reason=WHY_NOT)
@pytest.mark.parametrize(("fusion", "path"), [("1", r"custom\.fused\.push"), ("0", r"(?!custom\.fused)\S+")])
def test_session_on_two_ranks_gives_the_bits_of_the_cpu_and_replays_a_graph(fusion: str, path: str) -> None:
    done = subprocess.run(
        [
            sys.executable,
            *("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", "tests/cuda/body.py"),
        ],
        cwd=ROOT,
        env={**os.environ, "WORKBENCH_FUSION": fusion, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(rf"^26 checks on 2 ranks over {path}$", done.stdout, re.MULTILINE), done.stdout
