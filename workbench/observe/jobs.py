"""Jobs that one recorded command starts: the first records into the directory, others below it, each of them whole.

torchrun's run id tells jobs apart, restarts share it. Ranks without a launcher, such as those of mp.spawn, belong
together if they meet at one place: a port, a file, a prefix of a store. A command may run one job after the other at
the same place: a rank that the job there has already, or that was started after all of that job had ended, opens
another.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

_CLAIMS = "jobs.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    """A process that became a rank: of which job (from 1), by which names, and when, in ns of the boot's clock."""

    job: int
    run: str
    place: str
    world_rank: int
    restarts: int
    pid: int
    boottime_ns: int


def claim_job(directory: str, environ: Mapping[str, str], world_rank: int, *, place: str | None = None) -> str:
    """Where a rank of this environment's job keeps its trace: `directory`, `directory/job-2`... Local; again is fine.

    place: where the rank meets the others, for one that no launcher made this rank; default: the launcher's place.
    Raises: OSError.
    """
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    run = "" if run == "none" else run  # torchrun's word for no id
    of_launcher = place is None and "TORCHELASTIC_RUN_ID" in environ
    if place is None:
        place = "" if of_launcher else environ.get("MASTER_PORT", "")
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "")
    Path(directory).mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(Path(directory, _CLAIMS), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        claims = _parse(file.read())
        mine = _Claim(
            job=0,
            run=run,
            place=place,
            world_rank=world_rank,
            restarts=int(restarts) if restarts.isdigit() else 0,
            pid=os.getpid(),
            boottime_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME),
        )
        latest = max((c.job for c in claims if (c.run, c.place) == (run, place)), default=0)
        members = [c for c in claims if c.job == latest]
        joins = bool(members) and (of_launcher or _belongs(mine, members))
        job = latest if joins else max((c.job for c in claims), default=0) + 1
        file.write(json.dumps({**asdict(mine), "job": job}) + "\n")
    return directory if job == 1 else os.path.join(directory, f"job-{job}")


def read_run_id(directory: str | os.PathLike[str]) -> str:
    """The run id that torchrun gave to the first job that recorded into `directory`; "" if it gave none."""
    claims = _read(directory)
    return claims[0].run if claims else ""


def find_jobs(directories: Iterable[str | os.PathLike[str]]) -> tuple[tuple[Path, ...], ...]:
    """The directories of each job's traces, in the order in which they began; of one job where there is none yet."""
    tops = [Path(d) for d in directories]
    below = {p.name for top in tops for p in top.glob("job-*") if p.is_dir() and p.name[4:].isdecimal()}
    later = sorted(below, key=lambda name: int(name[4:]))
    return (tuple(tops), *(tuple(top / name for top in tops if (top / name).is_dir()) for name in later))


def find_lost(job: Iterable[Path], found: Collection[tuple[int, int]]) -> tuple[int, ...]:
    """World ranks that were to record into these directories, of the latest restart, and left no file.

    job: one of find_jobs. found: world rank and pid of those that left one.
    """
    lost = set()
    for directory in job:
        number = int(directory.name[4:]) if re.fullmatch(r"job-\d+", directory.name) else 1
        top = directory if number == 1 else directory.parent
        latest = {c.pid: c for c in _read(top)}  # a process may have become another rank
        members = [c for c in latest.values() if c.job == number]
        restarts = max((c.restarts for c in members), default=0)
        lost |= {c.world_rank for c in members if c.restarts == restarts and (c.world_rank, c.pid) not in found}
    return tuple(sorted(lost))


def _belongs(mine: _Claim, members: list[_Claim]) -> bool:
    """Whether this rank is of the job whose ranks these are, and not of another one after it at the same place."""
    again = [c for c in members if c.restarts == mine.restarts]
    if not again:
        return True
    if any(c.world_rank == mine.world_rank for c in again):
        return any((c.world_rank, c.pid) == (mine.world_rank, mine.pid) for c in again)
    return _started_by_ns() <= again[0].boottime_ns or any(_lives(c.pid) for c in again)


def _started_by_ns() -> int:
    """By when this process was certainly started, on the boot's clock, which the kernel notes in hundredths."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return (int(fields[19]) + 1) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _read(directory: str | os.PathLike[str]) -> list[_Claim]:
    try:
        return _parse(Path(directory, _CLAIMS).read_text(errors="replace"))
    except OSError:
        return []


def _parse(text: str) -> list[_Claim]:
    """The claims in order; lines that no claim wrote are passed over."""
    found = []
    for line in text.splitlines():
        try:
            data = json.loads(line)
            numbers = {name: int(data[name]) for name in ("job", "world_rank", "restarts", "pid", "boottime_ns")}
            found.append(_Claim(run=str(data["run"]), place=str(data["place"]), **numbers))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            continue
    return [c for c in found if c.job > 0]
