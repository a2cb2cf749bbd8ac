"""Programs run as `workbench trace` runs them, in real processes with a deadline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.observe import read_observed, recorded_environment
from workbench.trace import Event, Phase, Trace

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parent.parent.parent
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@dataclass(frozen=True)
class Traced:
    """What a `workbench trace` gave: its status, its document, what it said, and the trace it left."""

    status: int
    document: dict[str, Any]
    stdout: str
    stderr: str
    directory: Path

    @property
    def trace(self) -> Trace:
        return read_observed(self.directory / "trace")


def environment(**more: str) -> dict[str, str]:
    """This one's, with this checkout before whatever PYTHONPATH held, and one thread a rank."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path, **more}


def torchrun(program: str | Path, *arguments: str, ranks: int = 2) -> list[str]:
    return [*TORCHRUN, str(ranks), str(PROGRAMS / program), *arguments]


def workbench_trace(
    directory: Path,
    command: Sequence[str],
    *,
    deadline_s: float = 60,
    keep: bool = False,
    limit_s: float = 100,
    **variables: str,
) -> Traced:
    """Run `workbench trace` on a command, as a user would."""
    document = directory / "verdict.json"
    out = directory / "out"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "workbench", "trace", "--deadline", str(deadline_s)),
            *(["--keep"] if keep else []),
            *("--out", str(out), "--json", str(document), "--", *command),
        ],
        env=environment(**variables),
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    found = json.loads(document.read_text()) if document.exists() else {}
    return Traced(done.returncode, found, done.stdout, done.stderr, out)


def workbench_diagnose(*arguments: str | Path, text: bytes = b"") -> subprocess.CompletedProcess[str]:
    """Run `workbench diagnose`, as a user would; `text` is its standard input."""
    done = subprocess.run(
        [sys.executable, "-m", "workbench", "diagnose", *map(str, arguments)],
        env=environment(),
        input=text,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def record(directory: Path, command: Sequence[str], *, limit_s: float = 100, **variables: str) -> tuple[Trace, str]:
    """Run a command recorded, without watching it: its trace and what it printed. It must succeed."""
    done = subprocess.run(
        command,
        env=recorded_environment(environment(**variables), str(directory / "trace")),
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read_observed(directory / "trace"), done.stdout


def begins(trace: Trace, world_rank: int) -> list[Event]:
    """The calls one rank began, in order."""
    found = trace.rank(world_rank)
    assert found is not None, f"world rank {world_rank} left no file"
    return [e for e in found.events if e.phase is Phase.BEGIN]


def results(output: str) -> Mapping[str, str]:
    """What the ranks printed: RESULT <rank> <values>."""
    lines = (told.partition("\n")[0] for told in output.split("RESULT ")[1:])  # two ranks may share a line
    return dict(sorted(line.split(" ", 1) for line in lines))
