"""Pins that a FlashInfer workspace made without its group is diagnosed: who came, who never will, and what to name.

The real FlashInfer under `workbench trace`, as a user would run it; on CPU ranks its rendezvous is entered through its
own backend, on GPUs through the workspace itself (tests/cuda/left_out.py).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
try:
    INSTALLED = bool(importlib.metadata.version("flashinfer-python"))
except importlib.metadata.PackageNotFoundError:
    INSTALLED = False


@pytest.mark.skipif(
    not INSTALLED, reason="FlashInfer is not installed; tests/backends/test_flashinfer_interface.py says how"
)
def test_a_rendezvous_without_its_group_is_told_with_the_ranks_that_never_come(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "workbench", "trace", "--deadline", "15", "--out", str(tmp_path / "trace")),
            *("--json", str(tmp_path / "verdict.json"), "--", sys.executable, "-m", "torch.distributed.run"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
            *("--nproc-per-node", "4", str(ROOT / "tests/cuda/left_out.py")),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    first = json.loads((tmp_path / "verdict.json").read_text())["findings"][0]
    assert (first["kind"], first["ranks"]) == ("rendezvous-partial", [2, 3])
    assert "TorchDistBackend.allgather" in first["message"]
    assert "world ranks 0,1 came" in first["message"]
    assert "group=" in first["fix"]
