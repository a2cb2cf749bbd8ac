"""Runs the kernel's stress program under ThreadSanitizer: ranks as threads, random delays, every sum checked.

The sanitizer sees each missing release, acquire or wait of the protocol: taking out any one of them turns this red.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import kernels_ext
from workbench.backends.build import find_compiler

ROOT = Path(kernels_ext.__path__[0])
FLAGS = ["-std=c++17", "-g", "-march=native", "-ffp-contract=off", "-w", "-pthread", f"-I{ROOT}/include"]


def compiled(directory: Path, *flags: str) -> Path | None:
    """The stress program built with `flags`, or None if this compiler cannot build or run such a thing."""
    command = find_compiler()
    if command is None:
        return None
    program = directory / "stress"
    line = [*command, *FLAGS, *flags, str(ROOT / "cpu" / "stress.cpp"), "-o", str(program)]
    if subprocess.run(line, check=False, capture_output=True, timeout=100).returncode != 0:
        return None
    return program


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = compiled(tmp_path_factory.mktemp("tsan"), "-O1", "-fsanitize=thread")
    if program is None or subprocess.run([program, "2", "0", "1"], check=False, capture_output=True).returncode != 0:
        pytest.skip("no compiler with a working ThreadSanitizer here")
    return program


@pytest.mark.parametrize(("ranks", "calls"), [(2, 60), (3, 40), (4, 40), (16, 4)])
def test_no_data_race_and_every_sum_right(sanitized: Path, ranks: int, calls: int) -> None:
    done = subprocess.run(
        [sanitized, str(ranks), str(calls), "7"], check=False, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr[:4000]
    assert done.stdout == f"{ranks} ranks, {calls} calls, seed 7: all right\n"
    assert done.stderr == ""
