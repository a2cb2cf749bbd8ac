"""Pins that the doctor tells what is missing instead of failing on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench import doctor
from workbench.backends import segments


def test_a_machine_without_shared_memory_is_told_and_needs_a_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_DIRECTORY", tmp_path / "none")
    rows = {row.name: row for row in doctor.examine()}
    assert rows["shared memory"].needs_hand
    assert rows["shared memory"].found.endswith("none: No such file or directory; groups take the gloo path")
    assert rows["segments"].found == "none left behind"


def test_a_compiler_that_cannot_be_found_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    row = next(row for row in doctor.examine() if row.name == "compiler")
    assert (row.needs_hand, row.advice) == (True, "install g++ or clang++, or set CXX")
