"""A trace file that is cut while it is written ends the recording, and neither the program nor its handling of SIGBUS.

Exact: exit statuses, what the program goes on to print, that stderr tells it once.
"""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from workbench.ranks import GroupKey
from workbench.trace import Recorder, TraceError, read_rank

PROGRAM = """
import faulthandler, mmap, os, sys, tempfile, threading
from workbench.ranks import GroupKey
from workbench.trace import Recorder
words = sys.argv[2:]

def write_beyond_a_file():
    with tempfile.TemporaryFile() as file:
        file.truncate(8192)
        mapped = mmap.mmap(file.fileno(), 8192)
        file.truncate(0)
        mapped[0] = 1

if "faulthandler before" in words: faulthandler.enable()
recorder = Recorder.open(sys.argv[1], 3)
lane = recorder.group(GroupKey("tp", (0, 1)))
lane.end(lane.begin("all_reduce"))
if "faulthandler after" in words: faulthandler.enable()
if "cut" in words: os.truncate(recorder.path, 0)
if "cut to its header" in words: os.truncate(recorder.path, 4096)
def work():
    for n in range(1000): lane.end(lane.begin("all_reduce", shape=(n,)), note="x" * 100)
threads = [threading.Thread(target=work) for _ in range(3)]
for t in threads: t.start()
for t in threads: t.join()
print("went on", flush=True)
if "another fault" in words: write_beyond_a_file()
if "another signal" in words: os.kill(os.getpid(), 7)
recorder.close()
if "a fault after it" in words: write_beyond_a_file()
print("ended", recorder.enabled)
"""


def run(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, str(directory), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("cut", ["cut", "cut to its header"])
@pytest.mark.parametrize("other", ["no other handler", "faulthandler before", "faulthandler after"])
def test_a_program_whose_trace_file_is_cut_goes_on_unrecorded(tmp_path: Path, cut: str, other: str) -> None:
    done = run(tmp_path, cut, other)
    assert (done.returncode, done.stdout) == (0, "went on\nended False\n"), done.stderr
    assert done.stderr.count("world rank 3 is not recorded any more: its trace file was cut or failed\n") == 1
    with pytest.raises(TraceError):
        read_rank(tmp_path / "rank-00003.wbtrace")


@pytest.mark.parametrize("fault", ["another fault", "another signal", "a fault after it"])
@pytest.mark.parametrize("before", ["whole", "cut"])
def test_any_other_bus_error_ends_a_program_as_it_would(tmp_path: Path, before: str, fault: str) -> None:
    done = run(tmp_path, before, fault)
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "went on\n"), done.stderr


def test_a_recorder_that_nobody_holds_is_let_go(tmp_path: Path) -> None:
    recorder = Recorder.open(tmp_path, 0)
    recorder.group(GroupKey("tp", (0, 1))).begin("all_reduce")
    gone = weakref.ref(recorder)
    mapped = weakref.ref(recorder._file._map)  # type: ignore[union-attr]  # it is open
    del recorder
    gc.collect()
    assert (gone(), mapped()) == (None, None)
