"""Pins how a kit of other systems' kernels is used: its columns, limits and memory, what fails, what is wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.forked import run_ranks
from tests.measure import bodies
from workbench.measure.kit import kit_versions
from workbench.trace import Scenario


def test_a_kits_columns_are_checked_and_timed_beside_ours(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copy(Path(__file__).parent / "small_kit.py", tmp_path / "measure_peers.py")
    (tmp_path / "VERSIONS").write_text("theirs 1.0\n")
    spec = bodies.spec(
        peers=str(tmp_path), tokens=(1, 3), dtype="float32", scenarios=(Scenario.TOGETHER, Scenario.GEMM)
    )
    (result, _), other = run_ranks(2, lambda rank: bodies.compare(spec))
    assert result["rows"] == other[0]["rows"]
    assert result["about"]["peers"] == ["theirs 1.0"]
    columns = {(row["scenario"], row["tokens"]): row["columns"] for row in result["rows"]}
    theirs = {key: {n: c["role"] for n, c in found.items() if n.startswith("sgl")} for key, found in columns.items()}
    assert theirs == {
        ("together", 1): {"sgl_fused_1": "peer", "sgl+norm": "peer", "sgl_ar": "part"},
        ("together", 3): {"sgl+norm": "peer", "sgl_ar": "part"},  # sgl_fused_1 takes two tokens at most
        ("gemm", 1): {"sgl_fused_1": "peer", "sgl+norm": "peer"},
        ("gemm", 3): {"sgl+norm": "peer"},
    }
    assert columns["together", 1]["sgl+norm"]["label"] == "SGLang all-reduce + norm"
    for row in result["rows"]:
        size = row["tokens"] * 64
        assert row["wrong"] == {"sgl_fused_2": f"world rank 0: sum + residual: 1 of {size} elements differ"}
        told = row["left_out"]["flashinfer"]
        assert told == "set-up of flashinfer: world ranks 0, 1: RuntimeError: no such wheel under /"
    assert "loading" not in capfd.readouterr().out


def test_a_directory_without_versions_has_none(tmp_path: Path) -> None:
    assert kit_versions(tmp_path) == []
