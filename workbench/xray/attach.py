"""A job that nobody recorded, looked at from outside: its ranks, their stacks, and the dumps torch itself left."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from workbench.diagnose import Finding, diagnose
from workbench.errors import ArgumentError
from workbench.observe import Frame
from workbench.trace import TraceError, read_flight_recorder
from workbench.xray.frames import program_frame
from workbench.xray.verdict import SCHEMA, Verdict, judge

_PY_SPY_S = 10.0
_DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_READ = ("RANK", "WORLD_SIZE", "WORKBENCH_OBSERVE", *_DUMPS)  # nothing else of a process's environment is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One rank's process from outside. `stack`: innermost first, empty where nobody may look. `state`: the kernel's."""

    pid: int
    world_rank: int
    state: str
    cpu_s: float
    stack: tuple[Frame, ...] = ()

    @property
    def call(self) -> str:
        """The function of torch.distributed that the program called and is inside of; "" if it is in none."""
        own = program_frame(self.stack)
        inner = () if own is None else self.stack[: self.stack.index(own)]
        inside = [f for f in inner if "torch/distributed" in f.file and not f.file.endswith("c10d_logger.py")]
        return inside[-1].function if inside else ""

    @property
    def place(self) -> str:
        """The call of torch.distributed it is in, and the program's line behind it; else where the kernel has it."""
        if not self.stack:
            return f"{self.state} (no stack)"
        own = program_frame(self.stack)
        return f"{self.call or self.stack[0].function} called by {own}"

    def to_json(self) -> dict[str, Any]:
        return {
            "pid": self.pid,
            "world_rank": self.world_rank,
            "state": self.state,
            "cpu_s": self.cpu_s,
            "stack": [str(f) for f in self.stack],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What could be seen, and what could not. `findings` only where torch or we had recorded something."""

    seen: tuple[Seen, ...]
    world_size: int
    findings: tuple[Finding, ...] = ()
    judged: bool = False
    unseen: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        verdict = ("defect" if self.findings else "ok") if self.judged else "unknown"
        return {
            "schema": SCHEMA,
            "verdict": verdict,
            "world_size": self.world_size,
            "command_status": None,
            "findings": [f.to_json() for f in self.findings],
            "processes": [s.to_json() for s in self.seen],
            "unseen": list(self.unseen),
        }

    def __str__(self) -> str:
        lines = [str(f) for f in self.findings] or ["no defect found so far" if self.judged else self._unjudged()]
        places: dict[str, list[int]] = {}
        for seen in self.seen:
            places.setdefault(seen.place, []).append(seen.world_rank)
        for place, ranks in places.items():
            lines.append(f"world rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {place}")
        return "\n".join([*lines, *(f"not seen: {text}" for text in self.unseen)])

    def _unjudged(self) -> str:
        """What stacks alone say: they hold no call that has ended, and no group."""
        if len(self.seen) == self.world_size and all(s.call for s in self.seen):
            return (
                "verdict: unknown, but every rank waits inside torch.distributed: if they still do in a minute, the "
                "job hangs. Calls that differ below are a hint; `workbench trace -- COMMAND` finds whose fault it is"
            )
        return "verdict: unknown, since no call was recorded; this is where the ranks stand"


def look_at(pid: int) -> View:
    """Look at the job of process `pid`: itself, what descends from it, and the other ranks of its launcher.

    Takes seconds; py-spy stops each process for a moment while it reads the stack.
    Raises: ArgumentError for a process that is not there, or a job without a rank.
    """
    ranks = _ranks_of(pid)
    variables = next(iter(ranks.values()))
    unseen: list[str] = []
    seen = tuple(sorted((_see(p, v, unseen) for p, v in ranks.items()), key=lambda s: s.world_rank))
    sizes = [int(v["WORLD_SIZE"]) for v in ranks.values() if v.get("WORLD_SIZE", "").isdigit()]
    world_size = max([len(seen), *sizes])
    missing = sorted(set(range(world_size)) - {s.world_rank for s in seen})
    if missing:
        unseen.append(f"world ranks {', '.join(map(str, missing))}: not below this launcher on this host, or gone")
    recorded = _recorded(variables, unseen)
    if recorded is not None and not recorded.recorded:
        unseen.append("which calls were made: the records of this job hold none")
    return View(
        seen=seen,
        world_size=world_size,
        findings=recorded.findings if recorded is not None else (),
        judged=recorded is not None and recorded.word in ("ok", "defect"),
        unseen=tuple(dict.fromkeys(unseen)),
    )


def find_py_spy() -> str | None:
    """The program that reads stacks from outside; None if it is not installed. Local."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))


def _ranks_of(pid: int) -> dict[psutil.Process, Mapping[str, str]]:
    """The processes that are ranks, and what their environments say of them."""
    try:
        process = psutil.Process(pid)
    except psutil.NoSuchProcess:
        raise ArgumentError(f"--pid {pid}: there is no such process; give the launcher's or a rank's") from None
    parent = process.parent()
    family = [process, *process.children(recursive=True)]
    if "RANK" in _variables(process) and parent is not None:
        family = [*family, *parent.children(recursive=True)]
    found: dict[str, tuple[psutil.Process, Mapping[str, str]]] = {}
    for member in family:  # parents before children: a rank's helpers inherit its number
        variables = _variables(member)
        if variables.get("RANK", "").isdigit():
            found.setdefault(variables["RANK"], (member, variables))
    if not found:
        raise ArgumentError(
            f"--pid {pid}: neither it nor what it started has a RANK, or another user's processes cannot be read; give "
            f"the pid of torchrun or of a rank"
        )
    return dict(found.values())


def _variables(process: psutil.Process) -> dict[str, str]:
    try:
        return {k: v for k, v in process.environ().items() if k in _READ}
    except (psutil.Error, OSError):
        return {}


def _see(process: psutil.Process, variables: Mapping[str, str], unseen: list[str]) -> Seen:
    rank = int(variables["RANK"])
    try:
        state, times = str(process.status()), process.cpu_times()
        cpu_s = round(times.user + times.system, 2)
    except psutil.Error:
        state, cpu_s = "gone", 0.0
    stack = _stack(process.pid, rank, unseen)
    return Seen(pid=process.pid, world_rank=rank, state=state, cpu_s=cpu_s, stack=stack)


def _stack(pid: int, rank: int, unseen: list[str]) -> tuple[Frame, ...]:
    """The main thread's Python frames by py-spy, innermost first."""
    program = find_py_spy()
    if program is None:
        unseen.append("stacks, the lines where the ranks stand: py-spy is not installed; pip install py-spy")
        return ()
    try:
        done = subprocess.run(
            [program, "dump", "--json", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=_PY_SPY_S,
            check=False,
        )
        threads = json.loads(done.stdout) if done.returncode == 0 else None
    except (subprocess.TimeoutExpired, ValueError, OSError) as e:
        unseen.append(f"stack of world rank {rank}: {type(e).__name__}")
        return ()
    if not threads:
        why = (done.stderr.strip().splitlines() or ["it gave none"])[-1]
        unseen.append(f"stack of world rank {rank}: py-spy: {why}")
        return ()
    main = next((t for t in threads if t.get("thread_name") == "MainThread"), threads[0])
    return tuple(Frame(f["name"], f["filename"], int(f["line"])) for f in main["frames"])


def _recorded(variables: Mapping[str, str], unseen: list[str]) -> Verdict | None:
    """The verdict from what we or torch recorded of this job; None, and why, if nobody did."""
    directory = variables.get("WORKBENCH_OBSERVE", "")
    if directory and Path(directory).is_dir():
        return judge(directory, running=True, deadline_s=0)
    if directory:
        unseen.append(f"what the job recorded: {directory} is gone")
    prefix = next((variables[name] for name in _DUMPS if variables.get(name)), "")
    if not prefix:
        if not directory:
            unseen.append(
                "which calls were made: the job was not started by `workbench trace`, and no dump is configured"
            )
        return None
    try:
        trace = read_flight_recorder(Path(prefix).parent)
    except (TraceError, OSError) as e:
        unseen.append(f"which calls were made: torch's Flight Recorder has left no dump yet ({e})")
        return None
    return Verdict(trace=trace, findings=diagnose(trace))
