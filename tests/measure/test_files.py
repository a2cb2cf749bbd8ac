"""Pins where results are written: whole or not at all, through links, and never in place of a device or a pipe."""

from __future__ import annotations

import os
import resource
import stat
from pathlib import Path

import pytest

from workbench.bench.files import check_place, write_whole
from workbench.errors import ArgumentError


def test_a_file_is_replaced_whole_and_nothing_stays_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "now.json"
    for text in ("a longer first text", "second"):
        check_place(path)
        write_whole(path, text)
        assert path.read_text() == text
    assert [p.name for p in tmp_path.iterdir()] == ["now.json"]


def test_a_link_stays_and_what_it_names_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    link = tmp_path / "latest.json"
    link.symlink_to(tmp_path / "results" / "1.json")
    write_whole(link, "first")
    assert link.is_symlink()
    assert (tmp_path / "results" / "1.json").read_text() == "first"


@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "loop", "lost"])
def test_what_a_rename_would_destroy_is_refused_and_stays(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "now.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to({"device": "/dev/null", "loop": path, "lost": tmp_path / "nowhere" / "now.json"}[kind])
    before = path.lstat().st_mode, Path("/dev/null").lstat().st_mode
    for attempt in (lambda: check_place(path), lambda: write_whole(path, "text")):
        with pytest.raises(ArgumentError, match="cannot be written"):
            attempt()
    assert (path.lstat().st_mode, Path("/dev/null").lstat().st_mode) == before
    assert stat.S_ISCHR(before[1])
    assert [p.name for p in tmp_path.iterdir()] == ["now.json"]


def test_a_text_that_cannot_be_written_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "now.json"
    write_whole(path, "old")
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, allowed[1]))  # as on a full disk: half of it is written
    try:
        with pytest.raises(ArgumentError, match="cannot be written: File too large"):
            write_whole(path, "x" * 8192)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["now.json"]
