"""The CUDA kernels on real GPUs, by the programs under benchmarks/: virtual ranks on one, real ranks on several."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (9, 10)

pytestmark = [
    pytest.mark.skipif(not HOPPER, reason="no GPU of compute capability 9.0 or 10.0"),
    pytest.mark.timeout(600),
]


def run(*line: str) -> str:
    done = subprocess.run([sys.executable, *line], cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_virtual_ranks_give_the_reference():
    assert "wrong: []" in run("tests/kernels_cuda/virtual_small.py")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_real_ranks_give_the_reference_and_name_who_is_missing():
    program = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "benchmarks/cuda_checks.py")
    told = run(*program, "--steps", "check,missing,memory,two,soak", "--soak-s", "10")
    assert told.splitlines()[-1].startswith("OK after ")
