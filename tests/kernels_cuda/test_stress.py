"""The push protocols on the host under ThreadSanitizer: ranks as groups of threads, random delays, every sum checked.

The twin (kernels_ext/cuda/stress.cpp) also fails where a push meets a slot that is still in use, or the early look one
in the half that is at rest. Three of its parts can be spoilt, and each time it must fail, or it would prove nothing.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from workbench.backends.build import find_compiler

ROOT = Path(__file__).resolve().parents[2] / "kernels_ext"
FLAGS = ("-std=c++17", "-g", "-O1", "-fsanitize=thread", "-pthread", f"-I{ROOT}/include")


def compiled(directory: Path, *flags: str) -> Path:
    command = find_compiler()
    if command is None:
        pytest.skip("no C++ compiler here")
    program = directory / "stress"
    line = [*command, *FLAGS, *flags, str(ROOT / "cuda" / "stress.cpp"), "-o", str(program)]
    done = subprocess.run(line, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[:4000]
    return program


def run(program: Path, *numbers: int) -> subprocess.CompletedProcess[str]:
    line = [str(program), *map(str, numbers)]
    return subprocess.run(line, check=False, capture_output=True, text=True, timeout=100)


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The twin, where an empty program runs under ThreadSanitizer; what goes wrong with the twin itself is red."""
    directory = tmp_path_factory.mktemp("tsan")
    (directory / "empty.cpp").write_text("int main() {}")
    command, empty = find_compiler(), directory / "empty"
    if command is None:
        pytest.skip("no C++ compiler here")
    line = [*command, *FLAGS, str(directory / "empty.cpp"), "-o", str(empty)]
    made = subprocess.run(line, check=False, capture_output=True, timeout=100)
    if made.returncode != 0 or run(empty).returncode != 0:
        pytest.skip("no compiler with a working ThreadSanitizer here")
    return compiled(directory)


@pytest.mark.parametrize(("ranks", "lanes", "calls"), [(2, 3, 80), (3, 2, 60), (4, 2, 60), (8, 2, 16), (16, 1, 8)])
def test_calls_of_both_algorithms_and_any_size_mix_on_one_workspace(sanitized, ranks, lanes, calls):
    done = run(sanitized, ranks, lanes, calls, 7)
    assert done.returncode == 0, done.stdout + done.stderr[:4000]
    assert done.stdout == f"{ranks} ranks, {lanes} lanes, {calls} calls: all right\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ("WBK_ONE_HALF", "into a slot in use"),
        ("WBK_NO_SENTINEL", "a slot in use"),
        ("WBK_OLD_LOOK", "a slot in use|wrong sum"),
    ],
)
def test_the_twin_notices_when_a_part_of_the_protocol_is_missing(tmp_path, sanitized, part, told):
    done = run(compiled(tmp_path, f"-D{part}"), 4, 2, 60, 7)
    assert done.returncode == 1
    assert re.search(told, done.stdout)
