"""Jobs that one recorded command starts one after the other: the first records into the directory, others below it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

_NAMES = "jobs.jsonl"


def claim_job(directory: str, environ: Mapping[str, str]) -> str:
    """Where a rank of this environment's job keeps its trace: `directory`, `directory/job-2`... Local; again is fine.

    Jobs are told apart by the run id that torchrun gives them; restarts share it. Ranks without one share a job.
    Raises: OSError.
    """
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    name = json.dumps("" if run == "none" else run)  # torchrun's word for no id
    Path(directory).mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(Path(directory, _NAMES), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        names = file.read().splitlines()
        if name not in names:
            file.write(f"{name}\n")
            names.append(name)
    number = names.index(name) + 1
    return directory if number == 1 else os.path.join(directory, f"job-{number}")


def read_run_id(directory: str | os.PathLike[str]) -> str:
    """The run id that torchrun gave to the first job that recorded into `directory`; "" if it gave none."""
    try:
        lines = Path(directory, _NAMES).read_text(errors="replace").splitlines()
        return str(json.loads(lines[0])) if lines else ""
    except (OSError, ValueError, RecursionError):
        return ""


def find_jobs(directories: Iterable[str | os.PathLike[str]]) -> tuple[tuple[Path, ...], ...]:
    """The directories of each job's traces, in the order in which they began; of one job where there is none yet."""
    tops = [Path(d) for d in directories]
    below = {p.name for top in tops for p in top.glob("job-*") if p.is_dir() and p.name[4:].isdecimal()}
    later = sorted(below, key=lambda name: int(name[4:]))
    return (tuple(tops), *(tuple(top / name for top in tops if (top / name).is_dir()) for name in later))
