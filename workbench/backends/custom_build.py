"""Compile the CUDA kernels with nvcc: once per sources and architecture, into the package's private cache.

An object holds no torch, no Python and a CUDA runtime of its own, so one made on any machine serves every machine of
its architecture: `export_cuda` puts it into a directory, `install_cuda` takes it there on a machine without nvcc.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from importlib import resources
from pathlib import Path

from workbench.backends.build import cache_directory, check_private, is_ready, locked, run_compiler, writing_to
from workbench.backends.sealed import copy_in_place, install_bytes, put_in_place, read_trusted
from workbench.errors import ArgumentError, ResourceError

UNITS = ("abi.cu", "memory.cu", "push_bf16.cu", "push_fp16.cu", "push_fp32.cu")
CUDA_HEADERS = ("launch.cuh", "push.cuh", "steps.cuh", "two_shot.cuh")
WBK_HEADERS = ("cuda_abi.h", "cuda_layout.h", "memory.cuh", "numbers.cuh")
FLAGS = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC")
ARCHES = ("90a", "100a")
LOCK_DEADLINE_S = 600.0
COMPILE_DEADLINE_S = 300.0
NO_NVCC = (
    "no nvcc was found ($CUDA_HOME/bin, PATH, /usr/local/cuda/bin), so the CUDA kernels cannot be compiled; install a "
    "CUDA 12.8 or later toolkit, set CUDA_HOME, or bring them: `workbench build --arch ARCH --out DIR` where nvcc is, "
    "`workbench build --from DIR` here"
)
_OBJECT = re.compile(r"wbk-cuda-sm_(\d+a)-([0-9a-f]{32})\.so")

Log = Callable[[str], None]


def find_nvcc() -> str | None:
    """The nvcc to use: $CUDA_HOME's, else the one on PATH, else /usr/local/cuda's; None if there is none."""
    home = os.environ.get("CUDA_HOME", "")
    return (
        shutil.which("nvcc", path=f"{home}/bin" if home else "")
        or shutil.which("nvcc")
        or shutil.which("nvcc", path="/usr/local/cuda/bin")
    )


def why_no_kernels(arch: str) -> str:
    """'' if the kernels for `arch` are in the cache or can be compiled here, else one line that says what to do."""
    return "" if find_nvcc() is not None or is_ready(_target(arch)) else NO_NVCC


def find_arches() -> tuple[str, ...]:
    """The architectures of this machine's GPUs for which there are kernels. Local; loads torch."""
    import torch

    capabilities = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return tuple(arch for arch in ARCHES if arch in {f"{major}{minor}a" for major, minor in capabilities})


def build_cuda(arch: str, *, force: bool = False, log: Log = lambda _line: None) -> Path:
    """The shared object of the CUDA kernels for `arch` (one of ARCHES), compiled now unless the cache holds it.

    Needs no GPU. `force` compiles even then. `log` receives one line for each thing done.
    Local; safe for any number of processes at once.
    Raises: ResourceError where it must compile and there is no nvcc, for a failed compilation with its first errors, or
        where another process holds the build lock too long.
    """
    target = _target(arch)
    if not force and is_ready(target):
        return target
    nvcc = find_nvcc()
    if nvcc is None:
        raise ResourceError(NO_NVCC)
    with locked(target.with_suffix(".lock"), "the CUDA kernels", LOCK_DEADLINE_S):
        if force or not is_ready(target):
            _compile(nvcc, arch, target, log)
    return check_private(target)


def export_cuda(arch: str, directory: Path) -> Path:
    """Copy the compiled object for `arch` from the cache into `directory`, which is made if it is missing."""
    made = _target(arch)
    directory.mkdir(parents=True, exist_ok=True)
    copy_in_place(made, directory / made.name)
    return directory / made.name


def install_cuda(directory: Path) -> dict[str, Path]:
    """Take the objects in `directory` that fit this package into the cache: {arch: where it is now}.

    Raises: ArgumentError if there is none, or if all those of an architecture were compiled from other sources than
        this package's; ResourceError if one is damaged or could have been written by another user.
    """
    found: dict[str, dict[str, Path]] = {}
    for path in sorted(directory.glob("*.so")):
        if match := _OBJECT.fullmatch(path.name):
            found.setdefault(match[1], {})[match[2]] = path
    if not found:
        raise ArgumentError(f"{directory} holds no wbk-cuda-*.so; `workbench build --arch ARCH --out DIR` makes one")
    for arch, by_key in found.items():
        if _key(arch) not in by_key:
            raise ArgumentError(
                f"{directory}: sm_{arch} was compiled from other kernel sources (key {', '.join(by_key)}) than this "
                f"package has (key {_key(arch)}); run `workbench build --arch sm_{arch} --out DIR` with this version"
            )
    taken = {arch: by_key[_key(arch)] for arch, by_key in found.items()}
    for arch, data in {arch: read_trusted(path) for arch, path in taken.items()}.items():
        install_bytes(data, _target(arch), taken[arch])
    return {arch: _target(arch) for arch in found}


def _target(arch: str) -> Path:
    return cache_directory() / f"wbk-cuda-sm_{arch}-{_key(arch)}.so"


@cache
def _sources() -> dict[str, str]:
    root = resources.files("kernels_ext")
    names = [f"cuda/{n}" for n in (*UNITS, *CUDA_HEADERS)] + [f"include/wbk/{n}" for n in WBK_HEADERS]
    return {name: root.joinpath(*name.split("/")).read_text(encoding="utf-8") for name in names}


@cache
def _key(arch: str) -> str:
    """What makes an object fit this package: not the compiler, so that a machine without one finds it too."""
    digest = hashlib.sha256()
    for part in (arch, *FLAGS, *(f"{n}\0{t}" for n, t in _sources().items())):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def _compile(nvcc: str, arch: str, target: Path, log: Log) -> None:
    started = time.monotonic()
    with (
        writing_to(target.parent),
        tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch,
    ):
        for name, text in _sources().items():
            path = Path(scratch, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        code = f"-gencode=arch=compute_{arch},code=sm_{arch}"
        log(f"compiling {len(UNITS)} files for sm_{arch} with {nvcc}")
        with ThreadPoolExecutor(min(len(UNITS), os.cpu_count() or 1)) as pool:
            jobs = {
                pool.submit(_run, [nvcc, *FLAGS, code, "-c", f"{scratch}/cuda/{u}", "-o", f"{scratch}/{u}.o"]): u
                for u in UNITS
            }
            for done, job in enumerate(as_completed(jobs), start=1):
                job.result()
                log(f"sm_{arch}: {done} of {len(UNITS)}, {jobs[job]}, after {time.monotonic() - started:.0f} s")
        made = Path(scratch, "made.so")
        objects = [f"{scratch}/{u}.o" for u in UNITS]
        _run([nvcc, "-shared", "-cudart", "static", *objects, "-o", str(made)])
        put_in_place(made, target)
    log(f"compiled in {time.monotonic() - started:.1f} s: {target}")


def _run(line: list[str]) -> None:
    done = run_compiler(line, COMPILE_DEADLINE_S)
    if done.returncode:
        text = (done.stderr or done.stdout).splitlines()
        errors = [t for t in text if "error" in t] or text
        raise ResourceError(
            f"compiling the CUDA kernels failed with status {done.returncode}:\n" + "\n".join(errors[:5])
        )
