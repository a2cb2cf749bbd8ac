"""Compile the CUDA kernels with nvcc: once per sources, compiler and architecture, into the package's private cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import resources
from pathlib import Path

from workbench.backends.build import cache_directory, check_private
from workbench.backends.sealed import is_whole, put_in_place
from workbench.errors import ResourceError

UNITS = ("abi.cu", "push_bf16.cu", "push_fp16.cu", "push_fp32.cu")
CUDA_HEADERS = ("launch.cuh", "push.cuh", "steps.cuh")
WBK_HEADERS = ("cuda_abi.h", "cuda_layout.h", "memory.cuh", "numbers.cuh")
FLAGS = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC")
ARCHES = ("90a", "100a")
LOCK_DEADLINE_S = 600.0
COMPILE_DEADLINE_S = 300.0
NO_NVCC = (
    "no nvcc was found ($CUDA_HOME/bin, PATH, /usr/local/cuda/bin), so the CUDA kernels cannot be compiled; install a "
    "CUDA 12.8 or later toolkit, or set CUDA_HOME"
)


def find_nvcc() -> str | None:
    """The nvcc to use: $CUDA_HOME's, else the one on PATH, else /usr/local/cuda's; None if there is none."""
    home = os.environ.get("CUDA_HOME", "")
    return (
        shutil.which("nvcc", path=f"{home}/bin" if home else "")
        or shutil.which("nvcc")
        or shutil.which("nvcc", path="/usr/local/cuda/bin")
    )


def build_cuda(arch: str) -> Path:
    """The shared object of the CUDA kernels for `arch` ("90a", "100a"), compiled now unless the cache holds it.

    Needs no GPU. Local; safe for any number of processes at once.
    Raises: ResourceError without nvcc, for a failed compilation with its first errors, or where another process holds
        the build lock too long.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise ResourceError(NO_NVCC)
    target = cache_directory() / f"wbk-cuda-sm_{arch}-{_key(nvcc, arch)}.so"
    if not _is_ready(target):
        lock = os.open(target.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            _lock(lock, target)
            if not _is_ready(target):
                _compile(nvcc, arch, target)
        finally:
            os.close(lock)
    return check_private(target)


def _is_ready(target: Path) -> bool:
    return target.exists() and is_whole(check_private(target))


@cache
def _sources() -> dict[str, str]:
    root = resources.files("kernels_ext")
    names = [f"cuda/{n}" for n in (*UNITS, *CUDA_HEADERS)] + [f"include/wbk/{n}" for n in WBK_HEADERS]
    return {name: root.joinpath(*name.split("/")).read_text() for name in names}


@cache
def _key(nvcc: str, arch: str) -> str:
    digest = hashlib.sha256()
    version = subprocess.run(
        [nvcc, "--version"], capture_output=True, text=True, errors="replace", timeout=30, check=False
    ).stdout
    for part in (version, arch, *FLAGS, *(f"{n}\0{t}" for n, t in _sources().items())):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def _lock(fd: int, target: Path) -> None:
    deadline = time.monotonic() + LOCK_DEADLINE_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ResourceError(
                    f"another process compiles {target} for more than {LOCK_DEADLINE_S:g} s; end it and try again"
                ) from None
            time.sleep(0.1)


def _compile(nvcc: str, arch: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch:
        for name, text in _sources().items():
            path = Path(scratch, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        code = f"-gencode=arch=compute_{arch},code=sm_{arch}"
        lines = [[nvcc, *FLAGS, code, "-c", f"{scratch}/cuda/{u}", "-o", f"{scratch}/{u}.o"] for u in UNITS]
        with ThreadPoolExecutor(min(len(UNITS), os.cpu_count() or 1)) as pool:
            list(pool.map(_run, lines))
        made = Path(scratch, "made.so")
        objects = [f"{scratch}/{u}.o" for u in UNITS]
        _run([nvcc, "-shared", "-cudart", "static", *objects, "-o", str(made)])
        put_in_place(made, target)


def _run(line: list[str]) -> None:
    try:
        done = subprocess.run(
            line, capture_output=True, text=True, errors="replace", timeout=COMPILE_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise ResourceError(f"compiling the CUDA kernels failed: {e}") from e
    if done.returncode:
        text = (done.stderr or done.stdout).splitlines()
        errors = [t for t in text if "error" in t] or text
        raise ResourceError(
            f"compiling the CUDA kernels failed with status {done.returncode}:\n" + "\n".join(errors[:5])
        )
