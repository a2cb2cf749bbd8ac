"""What this machine offers, what is missing, and what earlier runs left behind."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workbench.backends import build, segments
from workbench.defects import FLASHINFER, NCCL, known_defects
from workbench.errors import ArgumentError
from workbench.fabric import Machine, describe_host
from workbench.launch import ClusterRecord, find_records, find_survivors, stop_survivors
from workbench.xray import find_py_spy

SMALL_SHM_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the doctor: a thing, what was found, and what to do about it where that is something."""

    name: str
    found: str
    advice: str = ""
    needs_hand: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def examine() -> tuple[Row, ...]:
    """Every row. Local; changes nothing."""
    return (
        _platform(),
        Row("python", platform.python_version()),
        *_torch(),
        _package("ipyparallel"),
        _package("jupyterlab"),
        _flashinfer(),
        _py_spy(),
        *_known_defects(),
        _compiler(),
        _shared_memory(),
        _segments(),
        _survivors(),
        *_clusters(),
        _browser(),
    )


def show_findings(rows: tuple[Row, ...]) -> str:
    """The rows as text: '!' marks those that need a hand."""
    width = max(len(r.name) for r in rows)
    lines = []
    for row in rows:
        lines.append(f"{'!' if row.needs_hand else ' '} {row.name:<{width}}  {row.found}")
        if row.advice:
            lines.append(f"  {'':<{width}}  -> {row.advice}")
    return "\n".join(lines)


def probe_machine() -> Machine:
    """This host's GPUs as a machine for `workbench why`. Takes seconds a GPU, and a context on each meanwhile.

    Local.   Raises: ArgumentError where torch finds no GPU.
    """
    import torch

    from workbench.runtime.probe import probe_facts

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise ArgumentError(
            "no GPU to describe on this host; `workbench why --show-machine h100x8` prints a simulated machine to "
            "start from"
        )
    facts = []
    for index in range(count):
        with torch.cuda.device(index):
            facts.append(probe_facts(index, device="cuda"))
    name = re.sub(r"[^A-Za-z0-9._-]", "-", platform.node()).strip("-._")[:64] or "this-host"
    notes = "; ".join(dict.fromkeys(note for f in facts for note in f.notes))
    about = "probed by workbench doctor" + (f" ({notes})" if notes else "")
    return describe_host(facts, name=name, about="".join(c if c.isprintable() else " " for c in about)[:400])


def clean_up(cluster: str | None = None) -> dict[str, Any]:
    """End survivors and remove abandoned segments of this user; give back what was removed, and what clusters run.

    cluster: the name of a running cluster to end too. Raises: ArgumentError if there is none of this name.
    """
    if cluster is not None:
        from workbench.launch import Cluster

        running = [r.name for r in find_records()]
        if cluster not in running:
            there = f"running: {', '.join(running)}" if running else "no cluster is running"
            raise ArgumentError(f"no running cluster is called {cluster!r}; {there}")
        Cluster.attach(cluster).close()
    stopped = stop_survivors(find_survivors())
    return {
        "ended_cluster": cluster,
        "clusters": [{"name": r.name, "found": describe_cluster(r)} for r in find_records()],
        "processes": [{"pid": s.pid, "command": s.command} for s in stopped],
        "segments": [s.name for s in segments.sweep_segments()],
    }


def _platform() -> Row:
    ok = sys.platform == "linux"
    return Row("system", f"{platform.system()} {platform.release()}", "" if ok else "a Session needs Linux", not ok)


def _torch() -> tuple[Row, ...]:
    import torch

    rows = [Row("torch", torch.__version__), Row("cores", str(len(os.sched_getaffinity(0))))]
    count = torch.cuda.device_count()
    names = sorted({torch.cuda.get_device_name(i) for i in range(count)})
    rows.append(Row("GPUs", f"{count} x {', '.join(names)}" if count else "none; ranks run on the CPU"))
    return tuple(rows)


def _package(name: str) -> Row:
    try:
        return Row(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Row(name, "not installed", f"pip install {name}", needs_hand=True)


def _flashinfer() -> Row:
    version = installed_versions().get(FLASHINFER)
    if version:
        return Row("flashinfer", version)
    return Row("flashinfer", "not installed (optional, for GPUs)", "pip install 'fusion-workbench[gpu]'")


def _py_spy() -> Row:
    program = find_py_spy()
    if program is not None:
        return Row("py-spy", program)
    return Row("py-spy", "not installed (optional, for stacks in `workbench diagnose --pid`)", "pip install py-spy")


def _known_defects() -> tuple[Row, ...]:
    """One row for each defect of what is installed; a version that is refused for one needs a hand."""
    return tuple(
        Row(f"defect of {package} {version}", f"{d.id}: {d.symptom} ({d.source})", d.do, needs_hand=d.refused)
        for package, version in installed_versions().items()
        for d in known_defects(package, version)
    )


def installed_versions() -> dict[str, str]:
    """The versions of FlashInfer and NCCL that this process would use, of those that are there. Local."""
    import torch.cuda.nccl
    import torch.distributed as dist

    found = {}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found[FLASHINFER] = importlib.metadata.version(FLASHINFER)
    if dist.is_nccl_available():
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call] # torch has no types here
        found[NCCL] = ".".join(map(str, version))
    return found


def _compiler() -> Row:
    compiler = build.find_compiler()
    if compiler is None:
        return Row("compiler", "none: groups take the gloo path", "install g++ or clang++, or set CXX", needs_hand=True)
    return Row("compiler", shlex.join(compiler))


def _shared_memory() -> Row:
    try:
        usage = shutil.disk_usage(segments.SEGMENT_DIRECTORY)
    except OSError as e:
        found = f"{segments.SEGMENT_DIRECTORY}: {e.strerror}; groups take the gloo path"
        return Row("shared memory", found, "mount a tmpfs there", needs_hand=True)
    found = f"{usage.free >> 20} MiB free of {usage.total >> 20} in {segments.SEGMENT_DIRECTORY}"
    small = usage.free < SMALL_SHM_BYTES
    return Row("shared memory", found, "give the container more, such as --shm-size=1g" if small else "", small)


def _segments() -> Row:
    stale = [s for s in segments.list_segments() if not s.alive]
    if not stale:
        return Row("segments", "none left behind")
    return Row("segments", f"{len(stale)} left behind", "workbench clean", needs_hand=True)


def _survivors() -> Row:
    found = find_survivors()
    if not found:
        return Row("survivors", "no process of an earlier run")
    return Row("survivors", ", ".join(f"pid {s.pid}" for s in found), "workbench clean", needs_hand=True)


def _clusters() -> tuple[Row, ...]:
    """One row for each running cluster: they are wanted, unless someone has forgotten them."""
    records = find_records(clear=False)
    if not records:
        return (Row("clusters", "none running"),)
    return tuple(
        Row("clusters" if len(records) == 1 else f"cluster {n}", describe_cluster(r), _advise(r))
        for n, r in enumerate(records, 1)
    )


def describe_cluster(record: ClusterRecord) -> str:
    """A running cluster in a line."""
    kept = "kept until it is closed" if record.keep else "ends with the program that started it"
    hours = (time.time() - record.started_s) / 3600
    return f"{record.name}: {record.ranks} ranks on {record.device}, up for {hours:.1f} h, {kept}"


def _advise(record: ClusterRecord) -> str:
    return f"Cluster.attach({record.name!r}) in Python, or end it: workbench clean --cluster {record.name}"


def _browser() -> Row:
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        path = shutil.which(name)
        if path:
            return Row("browser", str(Path(path)))
    return Row("browser", "no Chromium: figures stay interactive, no static twins (optional)")
