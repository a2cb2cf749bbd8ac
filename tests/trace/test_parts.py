"""The words for the parts of an all-to-all: as read as written, of bounded length, and nothing made of nonsense."""

from __future__ import annotations

import pytest

from workbench.trace import Parts


def test_parts_are_written_with_their_runs_and_read_back() -> None:
    parts = Parts((12, 8, 8, 8), (0, 20, 20, 20))
    assert str(parts) == "sends 12,8x3; takes 0,20x3"
    assert Parts.parse(f"default group; async; {parts}") == parts
    assert Parts.parse(f"{parts}; for step 3") == parts


def test_parts_that_would_take_too_long_a_note_are_left_out() -> None:
    many = Parts(tuple(range(1000)), tuple(range(1000)))
    assert str(many) == ""
    alike = Parts((7,) * 4096, (9,) * 4096)
    assert str(alike) == "sends 7x4096; takes 9x4096"
    assert Parts.parse(str(alike)) == alike


@pytest.mark.parametrize(
    "note", ["", "async", "sends 1,2", "sends x; takes 1", "sends 1x99999999999; takes 1", "sends 1,,2; takes 3"]
)
def test_other_notes_speak_of_no_parts(note: str) -> None:
    assert Parts.parse(note) is None
