"""Pins how the CPU kernels are compiled: once, into a private place, and with an error that shows what went wrong."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.backends.ranks import request, run_outcomes, run_ranks
from workbench.backends import build, shm
from workbench.backends.base import Verdict
from workbench.backends.build import build_ahead, build_cpu, cache_directory, find_compiler, run_compiler
from workbench.backends.shm_library import load_library
from workbench.errors import ResourceError
from workbench.ranks import GroupKey

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of our own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fusion-workbench"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile without optimisation: these tests are about files, not about speed."""
    monkeypatch.setattr(build, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in build.FLAGS))
    build._key.cache_clear()
    yield
    build._key.cache_clear()


def compiler_script(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cxx"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@needs_compiler
def test_the_object_is_private_loads_and_is_compiled_once(cache: Path, quick: None) -> None:
    lines: list[str] = []
    path = build_cpu(log=lines.append)
    assert path.parent == cache
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert len(lines) == 2
    assert load_library(path).wbk_abi_version() == 1
    made = path.stat().st_mtime_ns
    assert build_cpu(log=lines.append) == path
    assert len(lines) == 2
    assert build_cpu(force=True, log=lines.append) == path
    assert len(lines) == 4
    assert path.stat().st_mtime_ns != made
    assert sorted(p.suffix for p in cache.iterdir()) == [".lock", ".so"]


@needs_compiler
def test_sixteen_processes_at_first_use_compile_once(cache: Path, quick: None, tmp_path: Path) -> None:
    command = find_compiler()
    assert command is not None
    count = tmp_path / "count"
    script = compiler_script(
        tmp_path, f'case "$*" in *--version*) ;; *) echo x >> {count} ;; esac\nexec {" ".join(command)} "$@"'
    )

    def rank_main(_rank: int) -> str:
        os.environ["CXX"] = str(script)
        return str(build_cpu())

    paths = run_ranks(16, rank_main)
    assert len(set(paths)) == 1
    assert count.read_text() == "x\n"
    load_library(Path(paths[0]))


def test_without_a_compiler_probe_says_so_in_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    verdict = shm.probe(request(64), GroupKey("tp", (0, 1)))
    assert not verdict.ok
    assert verdict.reason.startswith("no C++ compiler ($CXX, c++, g++ or clang++) was found")
    assert "\n" not in verdict.reason
    with pytest.raises(ResourceError, match="no C\\+\\+ compiler"):
        build_cpu()


def test_cxx_is_taken_with_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "env -u NOTHING c++")
    command = find_compiler()
    assert command is not None
    assert Path(command[0]).name == "env"
    assert command[1:] == ("-u", "NOTHING", "c++")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert find_compiler() is None


@pytest.mark.parametrize(
    ("cxx", "message"),
    [
        ("'", 'CXX="\'" names no program (No closing quotation); set it to a C++ compiler, or unset it'),
        ("no-such-compiler -O2", "CXX='no-such-compiler -O2' names no program; set it to a C++ compiler, or unset it"),
    ],
)
def test_a_cxx_that_is_no_command_is_a_verdict_and_a_resource_error(
    cache: Path, monkeypatch: pytest.MonkeyPatch, cxx: str, message: str
) -> None:
    monkeypatch.setenv("CXX", cxx)
    assert shm.probe(request(64), GroupKey("tp", (0, 1))) == Verdict(False, message)
    with pytest.raises(ResourceError) as caught:
        build_cpu()
    assert str(caught.value) == message


def test_a_compiler_that_prints_no_utf8_does_not_disturb(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(compiler_script(tmp_path, "printf '\\351\\n' >&2; exit 3")))
    with pytest.raises(ResourceError, match="failed with status 3"):
        build_cpu()


@needs_compiler
@pytest.mark.parametrize("damage", ["short", "empty", "one byte", "foreign"])
def test_a_damaged_object_is_compiled_anew_and_never_loaded(cache: Path, quick: None, damage: str) -> None:
    """A short object would end every rank by SIGBUS inside the loader."""
    path = build_cpu()
    good = path.read_bytes()
    middle = len(good) // 2
    path.write_bytes(
        {
            "short": good[:middle],
            "empty": b"",
            "one byte": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :],
            "foreign": b"no object of ours",
        }[damage]
    )
    lines: list[str] = []
    assert build_cpu(log=lines.append) == path
    assert lines[0] == f"{path} is damaged; compiling anew"
    code = f"import ctypes; print(ctypes.CDLL({str(path)!r}).wbk_abi_version())"  # elsewhere: it could be fatal
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n")


def test_a_broken_compiler_shows_its_first_errors(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = compiler_script(
        tmp_path,
        'case "$*" in *--version*) echo broken 1.0; exit 0;; esac\n'
        "echo 'note: on my way' >&2; echo 'shm.cpp:3:1: error: I do not like Mondays' >&2; exit 4",
    )
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(ResourceError) as caught:
        build_cpu()
    assert "failed with status 4; its first errors:\nshm.cpp:3:1: error: I do not like Mondays" in str(caught.value)
    assert "on my way" not in str(caught.value)
    assert sorted(p.suffix for p in cache.iterdir()) == [".failed", ".lock"]


def test_sixteen_processes_with_a_broken_compiler_try_it_once_and_all_say_why(cache: Path, tmp_path: Path) -> None:
    """Each in its turn would hold up the others for as long as the compiler takes to fail."""
    count = tmp_path / "count"
    script = compiler_script(tmp_path, f'case "$*" in *--version*) exit 0;; esac\necho x >> {count}; sleep 1; exit 4')

    def rank_main(_rank: int) -> str:
        os.environ["CXX"] = str(script)
        with pytest.raises(ResourceError) as caught:
            build_cpu()
        return str(caught.value)

    texts = set(run_ranks(16, rank_main))
    assert len(texts) == 1
    assert "failed with status 4" in texts.pop()
    assert count.read_text() == "x\n"


@needs_compiler
def test_a_compiler_that_was_mended_is_tried_again_by_the_commands_at_once_and_by_ranks_after_a_minute(
    cache: Path, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = find_compiler()
    assert command is not None
    monkeypatch.setenv("CXX", str(compiler_script(tmp_path, "exit 4")))
    lines: list[str] = []
    build_ahead(lines.append)
    assert lines[1].startswith("without the shared-memory kernels, gloo serves: compiling the CPU kernels with ")
    build._key.cache_clear()  # as in another process
    compiler_script(tmp_path, f'exec {" ".join(command)} "$@"')
    with pytest.raises(ResourceError, match="failed with status 4"):
        build_cpu()
    [failure] = cache.glob("*.failed")
    os.utime(failure, (time.time() - 61, time.time() - 61))
    assert build_cpu().exists()
    os.utime(failure)
    build_ahead(lines.append)
    assert (len(lines), failure.exists()) == (2, False)  # nothing to do, nothing to say


@pytest.mark.parametrize("how", ["deadline", "Ctrl-C"])
def test_a_compiler_that_hangs_is_ended_with_all_it_started(cache: Path, tmp_path: Path, how: str) -> None:
    started = tmp_path / "started"
    script = compiler_script(tmp_path, f"sleep 1000 & echo $! > {started}.new; mv {started}.new {started}; wait")

    def rank_main(_rank: int) -> str:
        error = ResourceError if how == "deadline" else KeyboardInterrupt
        with pytest.raises(error) as caught:
            run_compiler([str(script)], 1.0 if how == "deadline" else 60.0)
        return str(caught.value)

    def interrupt(pids: Sequence[int]) -> None:
        deadline = time.monotonic() + 30
        while not started.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        if how == "Ctrl-C":
            os.kill(pids[0], signal.SIGINT)

    [ended] = run_outcomes(1, rank_main, while_running=interrupt)
    assert ended.error is None, ended.trace
    if how == "deadline":
        assert "did not end within 1 s, so it was ended" in ended.value
    state = Path(f"/proc/{started.read_text().strip()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


@needs_compiler
def test_what_a_builder_left_that_was_killed_is_removed_by_a_later_one(cache: Path, quick: None) -> None:
    old, fresh = cache_directory() / "build-old", cache_directory() / "build-fresh"
    for left in (old, fresh):
        left.mkdir()
        (left / "shm.cpp").touch()
    os.utime(old, (1, 1))
    build_cpu()
    assert (old.exists(), fresh.exists()) == (False, True)  # another process may be at work in a fresh one


def test_an_object_that_others_could_have_written_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = find_compiler()
    if command is None:
        pytest.skip("no C++ compiler here")
    planted = cache_directory() / f"wbk-cpu-{build._key(command)}.so"
    planted.write_bytes(b"")
    planted.chmod(0o722)
    with pytest.raises(ResourceError, match=r"is not used: owner uid \d+, mode -rwx-w--w-"):
        build_cpu()
    planted.unlink()
    planted.symlink_to("/usr/bin/true")
    with pytest.raises(ResourceError, match="it must be no link"):
        build_cpu()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_another_users_object_is_refused(cache: Path) -> None:
    command = find_compiler()
    if command is None:
        pytest.skip("no C++ compiler here")
    planted = cache_directory() / f"wbk-cpu-{build._key(command)}.so"
    planted.write_bytes(b"")
    os.chown(planted, 12345, 12345)
    with pytest.raises(ResourceError, match="owner uid 12345"):
        build_cpu()


def test_a_cache_directory_open_to_others_is_refused(cache: Path) -> None:
    cache.mkdir(mode=0o700)
    cache.chmod(0o777)
    with pytest.raises(ResourceError, match="is not used"):
        cache_directory()


def test_a_cache_that_cannot_be_made_says_which_variable_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.raises(ResourceError, match="set XDG_CACHE_HOME"):
        cache_directory()


@needs_compiler
def test_a_builder_that_died_does_not_block_and_one_that_hangs_is_named(
    cache: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = find_compiler()
    assert command is not None
    lock = cache_directory() / f"wbk-cpu-{build._key(command)}.lock"
    code = (
        f"import fcntl, os, time; f = open({str(lock)!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
        f"print(os.getpid(), end='', file=f, flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + 30
        while not lock.exists() or not lock.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        pid = holder.pid
        monkeypatch.setattr(build, "LOCK_DEADLINE_S", 0.3)
        with pytest.raises(ResourceError, match=f"process {pid} compiles the CPU kernels for more than 0.3 s"):
            build_cpu()
        holder.kill()
        holder.wait()
        assert build_cpu().exists()
    finally:
        holder.kill()
        holder.wait()


def test_an_object_of_another_version_or_no_object_is_refused(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing.so"
    nothing.write_bytes(b"no object")
    with pytest.raises(ResourceError, match="cannot be loaded"):
        load_library(nothing)


@needs_compiler
def test_a_cache_that_cannot_be_written_says_which_variable_helps(cache: Path) -> None:
    command = find_compiler()
    assert command is not None
    lock = cache_directory() / f"wbk-cpu-{build._key(command)}.lock"
    lock.symlink_to("/nowhere")  # root writes everywhere, but opens no link
    with pytest.raises(ResourceError, match=r"cannot keep compiled kernels: .*set XDG_CACHE_HOME to a directory"):
        build_cpu()
