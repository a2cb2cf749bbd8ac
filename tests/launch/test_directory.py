"""Pins what a cluster makes of a temporary directory that others have been in, and of records that are none."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from workbench import Cluster
from workbench.errors import ResourceError
from workbench.launch import directory, find_records
from workbench.launch.directory import ClusterRecord, claim_directory, directories
from workbench.launch.survivors import run_tag


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def _plant(path: Path, what: str) -> None:
    if what == "a file":
        path.touch(mode=0o600)
    elif what == "a link to a directory":
        (path.parent / "elsewhere").mkdir(mode=0o700)
        path.symlink_to(path.parent / "elsewhere")
    elif what == "a link to nothing":
        path.symlink_to(path.parent / "nowhere")
    else:
        path.mkdir()
        path.chmod(0o770)


@pytest.mark.parametrize("what", ["a file", "a link to a directory", "a link to nothing", "open to a group"])
def test_what_another_user_may_have_planted_is_refused_with_words(temporary: Path, what: str) -> None:
    path = temporary / f"workbench-{os.getuid()}"
    _plant(path, what)
    with pytest.raises(ResourceError, match=r"must be a directory of user \d+ with mode 0700.*TMPDIR"):
        Cluster(ranks=2, device="cpu")
    assert not (temporary / "nowhere").exists()
    assert not list((temporary / "elsewhere").glob("*"))


def test_a_temporary_directory_that_is_gone_is_told_with_the_way_out(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "gone"))
    with pytest.raises(ResourceError, match="cannot be made: No such file or directory; set TMPDIR"):
        Cluster.find()


def test_a_full_disk_is_told_before_anything_starts(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory.shutil, "disk_usage", lambda _: SimpleNamespace(free=5 << 20))  # no disk to fill here
    with pytest.raises(
        ResourceError, match=r"2 ranks need 24 MiB for their traces.* has 5 MiB left; make room, set TMPDI"
    ):
        Cluster(ranks=2, device="cpu")
    assert not list(directories().iterdir())


def test_new_directories_are_private_whatever_the_umask(temporary: Path) -> None:
    before = os.umask(0)
    try:
        claimed = claim_directory(1)
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (claimed, claimed.parent)] == [0o700, 0o700]


def test_an_old_record_of_another_version_is_cleared_away_once_its_controller_is_gone(temporary: Path) -> None:
    runs, ended = claim_directory(1), claim_directory(1)
    for claimed, controller in ((runs, run_tag()), (ended, "1.2.3")):
        (claimed / "cluster.json").write_text(json.dumps({"schema": 2, "controller": controller}))
        os.utime(claimed, (0, 0))
    assert find_records() == ()
    assert list(directories().iterdir()) == [runs]


RECORDS = ["{", "[]", "3", "{}", '{"schema": 1}', '{"schema": 1, "rank_marks": 3}', '{"schema": 2}', "\udcff"]


@pytest.mark.parametrize("text", RECORDS)
def test_a_record_that_is_none_hides_no_other_and_says_what_can_be_removed(temporary: Path, text: str) -> None:
    claimed = claim_directory(1)
    (claimed / "cluster.json").write_text(text, errors="surrogateescape")
    (directories() / "stray").touch()
    assert find_records() == ()
    assert Cluster.find() == ()
    with pytest.raises(ResourceError, match=r"cluster\.json is no record of this version.*can be removed"):
        ClusterRecord.load(claimed)


def test_a_record_of_a_cluster_whose_controller_is_gone_is_cleared_away(temporary: Path) -> None:
    claimed = claim_directory(1)
    record = {
        **{"name": claimed.name, "ranks": 1, "device": "cpu", "timeout_s": 1.0, "keep": True, "rank_marks": []},
        **{"controller": "1.2.3", "agent": "1.2.3", "started_s": 0.0, "schema": 1},
    }
    (claimed / "cluster.json").write_text(json.dumps(record))
    assert find_records(clear=False) == ()
    assert claimed.exists()
    assert find_records() == ()
    assert not claimed.exists()
