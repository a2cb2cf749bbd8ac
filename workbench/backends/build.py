"""Compile the CPU kernels where they run: once per machine, sources, compiler and flags, into a private cache.

The object is made for exactly this processor, so the processor is part of its name. Sixteen ranks that start at once
compile once: the first holds a lock file, the others wait for it, with a deadline.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import resources
from pathlib import Path

from workbench.backends.sealed import is_whole, put_in_place
from workbench.errors import ResourceError

FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-fno-fast-math",
    "-ffp-contract=off",  # a fused multiply-add would round otherwise than the reference
    "-w",
)
UNIT = "cpu/shm.cpp"
HEADERS = ("include/wbk/abi.h", "cpu/lanes.h", "cpu/rows.h", "cpu/segment.h", "cpu/wait.h")
COMPILERS = ("c++", "g++", "clang++")
LOCK_DEADLINE_S = 180.0
COMPILE_DEADLINE_S = 150.0
VERSION_DEADLINE_S = 30.0
FAILURE_HOLDS_S = 60.0
ABANDONED_S = 3600.0  # a scratch directory this old is nobody's: its process was killed


def build_cpu(*, force: bool = False, log: Callable[[str], None] = lambda _line: None) -> Path:
    """The shared object of the CPU kernels, compiled now unless the cache holds it.

    `force` compiles even then. `log` receives one line for each thing done. A failure is not tried again for a minute,
    by any process: a compiler that hangs would hold up each rank in turn.
    Local; safe for any number of processes at once.
    Raises: ResourceError without a compiler (see find_compiler), for a failed compilation with the compiler's first
        errors, for a cache that is not ours alone, and where another process holds the build lock too long.
    """
    command = find_compiler()
    if command is None:
        raise ResourceError(why_no_compiler())
    directory = cache_directory()
    failure = _failure_file(directory, command)
    if not force:
        _raise_known(failure)
    try:
        target = directory / f"wbk-cpu-{_key(command)}.so"
    except ResourceError as e:
        _remember(failure, e)
        raise
    if not force and is_ready(target):
        return target
    with locked(target.with_suffix(".lock"), "the CPU kernels", LOCK_DEADLINE_S):
        if not force and is_ready(target):
            return target
        if not force:
            _raise_known(failure)  # whoever held the lock has tried
        if target.exists() and not force:
            log(f"{target} is damaged; compiling anew")
        started = time.monotonic()
        log(f"compiling the CPU kernels with {shlex.join(command)}")
        try:
            _compile(command, target)
        except ResourceError as e:
            _remember(failure, e)
            raise
        log(f"compiled in {time.monotonic() - started:.1f} s: {target}")
    return check_private(target)


def build_ahead(log: Callable[[str], None]) -> None:
    """Compile before ranks start that would do it silently. Where it cannot be, one line says why; gloo then serves.

    What failed before is tried again; the ranks take what is found now. Local.
    """
    command = find_compiler()
    try:
        if command is not None:
            _failure_file(cache_directory(), command).unlink(missing_ok=True)
        build_cpu(log=log)
    except ResourceError as e:
        log(f"without the shared-memory kernels, gloo serves: {' '.join(str(e).split())}")


def is_ready(target: Path) -> bool:
    """True if the cache holds the whole object. Raises ResourceError if others could write to it."""
    return target.exists() and is_whole(check_private(target))


def find_compiler() -> tuple[str, ...] | None:
    """The C++ compiler as a command: $CXX if it is set, else the first of c++, g++, clang++; None if there is none."""
    try:
        asked = shlex.split(os.environ.get("CXX", ""))
    except ValueError:
        return None  # why_no_compiler tells
    for candidate in [asked] if asked else [[name] for name in COMPILERS]:
        found = shutil.which(candidate[0])
        if found is not None:
            return (found, *candidate[1:])
    return None


def why_no_compiler() -> str:
    """One line for where find_compiler finds none."""
    cxx = os.environ.get("CXX", "")
    unreadable = ""
    try:
        if not shlex.split(cxx):
            return NO_COMPILER
    except ValueError as e:
        unreadable = f" ({e})"
    return f"CXX={cxx!r} names no program{unreadable}; set it to a C++ compiler, or unset it"


NO_COMPILER = (
    "no C++ compiler ($CXX, c++, g++ or clang++) was found, so the shared-memory kernels cannot be compiled; "
    "install g++ or clang, or set CXX; until then gloo serves"
)


def cache_directory() -> Path:
    """Our directory for compiled objects, created with mode 0700. Raises ResourceError if others could write to it."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        directory = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "fusion-workbench"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as e:
        raise ResourceError(f"no directory for compiled kernels: {e}; set XDG_CACHE_HOME to one you can write") from e
    return check_private(directory)


def check_private(path: Path) -> Path:
    """`path`, unless it is a link, is not ours, or can be written by group or others: then ResourceError."""
    info = path.lstat()
    if stat.S_ISLNK(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise ResourceError(
            f"{path} is not used: owner uid {info.st_uid}, mode {stat.filemode(info.st_mode)}; it must be no link, "
            f"belong to uid {os.geteuid()} and be writable by nobody else; remove it, or set XDG_CACHE_HOME"
        )
    return path


@cache
def _sources() -> dict[str, str]:
    root = resources.files("kernels_ext")
    return {name: root.joinpath(*name.split("/")).read_text(encoding="utf-8") for name in (*HEADERS, UNIT)}


@cache
def _key(command: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for part in (*command, *FLAGS, _version(command), _processor(), *(f"{n}\0{t}" for n, t in _sources().items())):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def _version(command: tuple[str, ...]) -> str:
    done = run_compiler([*command, "--version"], VERSION_DEADLINE_S)
    return done.stdout + done.stderr


def _processor() -> str:
    """What -march=native depends on: architecture, model and feature flags."""
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part", "CPU variant")
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    return platform.machine() + "\n" + "\n".join(line for line in lines if line.startswith(wanted))


def _failure_file(directory: Path, command: tuple[str, ...]) -> Path:
    """Where the last failure of a compiler is kept."""
    return directory / f"wbk-cpu-{hashlib.sha256(shlex.join(command).encode()).hexdigest()[:32]}.failed"


def _remember(failure: Path, error: ResourceError) -> None:
    with contextlib.suppress(OSError):
        failure.write_text(str(error), encoding="utf-8")


def _raise_known(failure: Path) -> None:
    """Raise what was remembered there, if it is fresh."""
    with contextlib.suppress(OSError):
        if abs(time.time() - failure.stat().st_mtime) < FAILURE_HOLDS_S:
            raise ResourceError(failure.read_text(encoding="utf-8"))


def run_compiler(line: Sequence[str], deadline_s: float) -> subprocess.CompletedProcess[str]:
    """Run a compiler, with all that it starts, and give what it printed. Local.

    Past the deadline, and on Ctrl-C, all of it is ended.   Raises: ResourceError if it does not start, or not end.
    """
    try:
        process = subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as e:
        raise ResourceError(f"the compiler {line[0]} does not run: {e}") from e
    with process:
        try:
            out, told = process.communicate(timeout=deadline_s)
        except BaseException as e:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(e, subprocess.TimeoutExpired):
                raise ResourceError(
                    f"the compiler {line[0]} did not end within {deadline_s:g} s, so it was ended; see whether it runs "
                    f"by hand, or set CXX to another"
                ) from None
            raise
    return subprocess.CompletedProcess(line, process.returncode, out, told)


def _compile(command: tuple[str, ...], target: Path) -> None:
    for left in target.parent.glob("build-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(left, ignore_errors=True)
    with (
        writing_to(target.parent),
        tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch,
    ):
        for name, text in _sources().items():
            path = Path(scratch, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        made = Path(scratch, "made.so")
        line = [*command, *FLAGS, f"-I{scratch}/include", f"{scratch}/{UNIT}", "-o", str(made)]
        done = run_compiler(line, COMPILE_DEADLINE_S)
        if done.returncode != 0 or not made.exists():
            raise ResourceError(
                f"compiling the CPU kernels with {shlex.join(command)} failed with status {done.returncode}; "
                f"its first errors:\n{_first_errors(done.stderr or done.stdout)}"
            )
        put_in_place(made, target)


def _first_errors(text: str) -> str:
    lines = text.splitlines()
    errors = [line for line in lines if "error" in line]
    return "\n".join((errors or lines)[:5]) or "(the compiler printed nothing)"


@contextmanager
def writing_to(cache: Path) -> Iterator[None]:
    """Raises ResourceError for an OSError in the block: a cache that is read-only, or full."""
    try:
        yield
    except OSError as e:
        raise ResourceError(
            f"{cache} cannot keep compiled kernels: {e.strerror or e}; make room, or set XDG_CACHE_HOME to a directory "
            f"that you can write"
        ) from e


@contextmanager
def locked(path: Path, what: str, deadline_s: float) -> Iterator[None]:
    """Hold the lock file; it frees itself if its holder dies. Raises ResourceError past the deadline."""
    with writing_to(path.parent):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + deadline_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    holder = os.pread(fd, 32, 0).decode(errors="replace") or "unknown"
                    raise ResourceError(
                        f"process {holder} compiles {what} for more than {deadline_s:g} s (lock {path}); "
                        f"end it, or run `workbench build`"
                    ) from None
                time.sleep(0.05)
        with writing_to(path.parent):
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(fd)
