"""The CUDA kernels are compiled once, without a GPU, and serve machines without nvcc. Pins files and refusals.

Compiles one file of four: these tests are about files. test_compile.py compiles the kernels.
"""

import json
import re

import pytest
import torch
from click.testing import CliRunner

from workbench.backends import custom_build
from workbench.cli import cli
from workbench.errors import ArgumentError, ResourceError

pytestmark = pytest.mark.skipif(custom_build.find_nvcc() is None, reason="no nvcc")


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    """An empty cache, and a library of one file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))
    monkeypatch.setattr(custom_build, "UNITS", ("abi.cu",))
    forget()
    yield
    forget()


def forget() -> None:
    custom_build._sources.cache_clear()
    custom_build._key.cache_clear()


@pytest.fixture
def exported(tmp_path, small):
    """A directory with an object, made by a machine with nvcc."""
    custom_build.build_cuda("90a")
    return custom_build.export_cuda("90a", tmp_path / "carried")


@pytest.fixture
def no_nvcc(tmp_path, exported, monkeypatch):
    """From now on another cache, on a machine without nvcc."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "there"))
    monkeypatch.setattr(custom_build, "find_nvcc", lambda: None)


def test_an_object_is_compiled_once_and_told_line_by_line():
    lines: list[str] = []
    path = custom_build.build_cuda("90a", log=lines.append)
    assert re.fullmatch(r"wbk-cuda-sm_90a-[0-9a-f]{32}\.so", path.name)
    assert [re.sub(r"[\d.]+ s", "N s", line).partition(": /")[0].partition(" with /")[0] for line in lines] == [
        "compiling 1 files for sm_90a",
        "sm_90a: 1 of 1, abi.cu, after N s",
        "compiled in N s",
    ]
    assert custom_build.build_cuda("90a", log=lines.append) == path
    assert len(lines) == 3


def test_a_machine_without_nvcc_takes_the_object_of_another(tmp_path, exported, no_nvcc):
    assert "no nvcc" in custom_build.why_no_kernels("90a")
    with pytest.raises(ResourceError, match="workbench build --from DIR"):
        custom_build.build_cuda("90a")
    done = CliRunner().invoke(cli, ["build", "--from", str(exported.parent), "--json"], catch_exceptions=False)
    there = tmp_path / "there" / "fusion-workbench" / exported.name
    assert json.loads(done.stdout) == {"schema": 1, "sm_90a": str(there)}
    assert custom_build.why_no_kernels("90a") == ""
    assert custom_build.build_cuda("90a") == there
    assert there.read_bytes() == exported.read_bytes()


def test_a_damaged_object_is_refused(exported, no_nvcc):
    exported.write_bytes(exported.read_bytes()[:-100])
    with pytest.raises(ResourceError, match="is damaged"):
        custom_build.install_cuda(exported.parent)
    assert "no nvcc" in custom_build.why_no_kernels("90a")


def test_an_object_of_other_sources_is_refused_with_both_keys(exported, no_nvcc, monkeypatch):
    old = custom_build._key("90a")
    monkeypatch.setattr(custom_build, "FLAGS", (*custom_build.FLAGS, "-DOTHER"))
    forget()
    new = custom_build._key("90a")
    with pytest.raises(
        ArgumentError, match=rf"key {old}\) than this package has \(key {new}\).*--arch sm_90a --out DIR"
    ):
        custom_build.install_cuda(exported.parent)


def test_the_object_that_fits_is_found_beside_one_that_does_not(exported, no_nvcc):
    other = exported.with_name(f"wbk-cuda-sm_90a-{'0' * 32}.so")
    other.write_bytes(exported.read_bytes())
    assert custom_build.install_cuda(exported.parent)["90a"].name == exported.name


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_no_cuda_kernels_are_compiled_unless_asked_for():
    done = CliRunner().invoke(cli, ["build", "--json"], catch_exceptions=False)
    assert json.loads(done.stdout).keys() == {"schema", "cpu"}


def test_a_directory_without_objects_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match=r"holds no wbk-cuda-\*\.so"):
        custom_build.install_cuda(tmp_path)


@pytest.mark.parametrize(
    ("options", "says"), [(["--out", "x"], "say which with --arch"), (["--from", ".", "--force"], "leave --force")]
)
def test_options_that_do_not_go_together_are_refused(options, says):
    done = CliRunner().invoke(cli, ["build", *options])
    assert done.exit_code == 2
    assert says in done.stderr
