"""Pins that the comparison of stored outputs can go red: one changed value is found, in the cell that holds it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent.parent


def test_nbval_goes_red_when_one_stored_value_is_changed(tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "notebooks" / "01_subgroup_rank_mapping.ipynb", as_version=4)
    cell = next(cell for cell in notebook["cells"] if cell["id"] == "wrong")
    text = cell["outputs"][0]["text"]
    assert "got 10.0" in text
    cell["outputs"][0]["text"] = text.replace("got 10.0", "got 30.0")  # what a right broadcast would have given
    end = notebook["cells"].index(cell) + 1
    notebook["cells"] = notebook["cells"][:end]
    nbformat.write(notebook, tmp_path / "changed.ipynb")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--nbval-lax", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "1 failed" in done.stdout
    assert "got 30.0" in done.stdout  # the stored value
    assert "got 10.0" in done.stdout  # what came out
