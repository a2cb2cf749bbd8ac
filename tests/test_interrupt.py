"""Pins Ctrl-C while a command still loads: it ends at once with 130, whatever the module that is loading does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SWALLOWS = """
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
except BaseException:
    pass
time.sleep(100)
"""
EXECUTES = "exec('os.kill(os.getpid(), signal.SIGINT)')\ntime.sleep(100)\n"


@pytest.mark.parametrize("module", [SWALLOWS, EXECUTES], ids=["swallows", "executes"])
def test_ctrl_c_inside_an_import_ends_with_130_and_one_line(tmp_path: Path, module: str) -> None:
    (tmp_path / "slow_to_load.py").write_text(f"import os, signal, time\n{module}")
    (tmp_path / "program.py").write_text(
        "from workbench.cli import cli, main\n\n\n@cli.command()\ndef load():\n    import slow_to_load\n\n\nmain()\n"
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), "load"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
