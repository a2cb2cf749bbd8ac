"""Pins which compiled objects of another machine are taken: whole ones that nobody else could have written.

The objects are made by hand: what they hold is never loaded here.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from workbench.backends import custom_build
from workbench.backends.sealed import put_in_place
from workbench.errors import ResourceError


@pytest.fixture
def carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole object for sm_90a of this package's sources, in a directory; and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = tmp_path / "carried"
    directory.mkdir(mode=0o755)
    made = directory / "made"
    made.write_bytes(b"an object")
    path = directory / f"wbk-cuda-sm_90a-{custom_build._key('90a')}.so"
    put_in_place(made, path)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ResourceError) as refused:
        custom_build.install_cuda(path.parent)
    assert list(custom_build.cache_directory().glob("*.so")) == []
    return str(refused.value)


def test_a_whole_object_of_our_own_is_taken_byte_for_byte(carried: Path) -> None:
    taken = custom_build.install_cuda(carried.parent)
    assert list(taken) == ["90a"]
    assert taken["90a"].read_bytes() == carried.read_bytes()


@pytest.mark.parametrize("mode", [0o720, 0o702], ids=["group", "others"])
def test_an_object_that_others_can_write_is_not_taken(carried: Path, mode: int) -> None:
    carried.chmod(mode)
    told = refusal(carried)
    assert told.startswith(f"{carried} is not taken: owner uid {os.geteuid()}, mode -rwx")
    assert "chmod go-w" in told


@pytest.mark.parametrize("mode", [0o775, 0o777, 0o1777], ids=["group", "others", "sticky"])
def test_a_directory_that_others_can_write_is_not_trusted(carried: Path, mode: int) -> None:
    carried.parent.chmod(mode)
    assert refusal(carried).startswith(f"{carried.parent} is not taken: owner uid {os.geteuid()}, mode drwx")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("what", ["object", "directory"])
def test_what_another_user_owns_is_not_taken(carried: Path, what: str) -> None:
    os.chown(carried if what == "object" else carried.parent, 12345, 12345)
    assert "is not taken: owner uid 12345" in refusal(carried)


def test_a_link_is_not_followed(carried: Path, tmp_path: Path) -> None:
    carried.rename(tmp_path / "elsewhere.so")
    carried.symlink_to(tmp_path / "elsewhere.so")
    assert f"{carried} is not taken: it is a link" in refusal(carried)


def test_a_pipe_holds_nobody_up(carried: Path) -> None:
    carried.unlink()
    os.mkfifo(carried, 0o600)
    assert f"{carried} is not taken: owner uid {os.geteuid()}, mode prw" in refusal(carried)


def test_a_damaged_object_is_told_and_not_taken(carried: Path) -> None:
    carried.write_bytes(carried.read_bytes()[:-1])
    assert "is damaged" in refusal(carried)
