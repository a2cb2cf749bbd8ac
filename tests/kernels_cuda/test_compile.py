"""The CUDA kernels compile without a GPU, for Hopper and Blackwell, and spill no registers."""

import re
import subprocess
from pathlib import Path

import pytest

from workbench.backends.custom_build import find_nvcc

UNIT = Path(__file__).resolve().parents[2] / "kernels_ext" / "cuda" / "push_bf16.cu"

pytestmark = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")


@pytest.mark.parametrize("arch", ["90a", "100a"])
def test_push_kernel_compiles(arch, tmp_path):
    code = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    line = [find_nvcc(), "-std=c++17", "-O3", "-Xptxas", "-v", code, "-c", str(UNIT), "-o", str(tmp_path / "o")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    kernel, report = r"((?:push|two_shot)_kernel\S+)' for", r"\s+\d+ bytes stack frame, (\d+) bytes spill"
    used = re.findall(rf"{kernel}.*\n.*\n{report}", done.stderr)
    assert len(used) == 12  # push for 2 and for any ranks, two-shot; with and without norm, real and virtual ranks
    assert [(name, int(spilled)) for name, spilled in used if int(spilled)] == []
