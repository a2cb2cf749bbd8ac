"""A comparison from outside: start the ranks, wait, read what they found. Or, under torchrun, be one of the ranks."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from workbench.backends.build import build_ahead
from workbench.errors import WorkbenchError
from workbench.launch import run_job
from workbench.measure import NO_MULTICAST, FusedSpec, count_cores
from workbench.trace import Comparison, parse_comparison, tell_crowding

_GRACE_S = 15.0


class MeasureError(WorkbenchError, RuntimeError):
    """The job failed or ran out of time. The message starts with the first rank that failed."""


def under_torchrun() -> bool:
    """Whether this process is one of the ranks of a job that torchrun started."""
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} <= os.environ.keys()


def run_comparison(spec: FusedSpec, *, out: Path | None, progress: Callable[[str], None]) -> Comparison:
    """Start spec.ranks ranks and give what they measured. `out` receives it too, anew after each number of tokens.

    Raises: MeasureError if the job fails; what was measured until then stays in `out`.
    """
    with tempfile.TemporaryDirectory(prefix="workbench-measure-") as scratch:
        directory = Path(scratch)
        result_file = out or directory / "result.json"
        (directory / "spec.json").write_text(json.dumps(spec.to_json()), encoding="utf-8")
        if spec.device == "cpu":
            build_ahead(progress)
        progress(f"starting {spec.ranks} ranks on {spec.device}")
        if spec.device == "cpu" and (crowded := tell_crowding(spec.ranks, count_cores())):
            progress(crowded)
        result = run_job(
            ["workbench.bench.rank", str(directory / "spec.json"), str(result_file.absolute())],
            ranks=spec.ranks,
            log_dir=directory / "logs",
            timeout_s=spec.limit_s + _GRACE_S,
            environment=NO_MULTICAST if spec.device == "cuda" else {},
            on_progress=progress,
        )
        if result.status != 0 or result.timed_out:
            kept = f"; what was measured until then, if anything, is in {out}" if out is not None else ""
            first = result.failure
            if result.timed_out:
                story = f"the job ran longer than {spec.limit_s:g} s and was ended; raise --limit or measure less"
            elif first is not None:
                story = f"world rank {first.world_rank} failed first: {first.message}"
            else:
                story = "torchrun itself ended"
            raise MeasureError(f"{story}{kept}\n{_tail(directory / 'logs' / 'output.log')}".rstrip())
        return parse_comparison(result_file.read_text(encoding="utf-8"), "the ranks' result")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-12:]) if log.exists() else ""
