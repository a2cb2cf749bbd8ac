"""The demo from outside: start the ranks, wait, read what they found, write the report."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from workbench.backends.build import build_ahead
from workbench.demo.report import write_report
from workbench.demo.spec import DemoSpec
from workbench.errors import WorkbenchError
from workbench.launch import run_job
from workbench.measure import count_cores
from workbench.trace import tell_crowding
from workbench.version import VERSION

_RANKS = re.compile(r"world ranks? \d+(?:(?:, |\.\.)\d+)*")


class DemoError(WorkbenchError, RuntimeError):
    """The job failed or ran out of time. The message starts with the first rank that failed."""


def run_demo(spec: DemoSpec, out: Path, *, progress: Callable[[str], None]) -> dict[str, Any]:
    """Run the demo into the directory `out`, claimed before, and give back what `workbench demo --json` prints.

    `out` receives result.json, one trace file a rank and report.html.
    Raises: LayoutError for sizes that do not fit, before anything starts; DemoError if the job fails.
    """
    group_map = spec.group_map()
    spec.save(out / "spec.json")
    if spec.device == "cpu":
        build_ahead(progress)
    progress(f"starting {group_map.world_size} ranks on {spec.device} with torchrun")
    if crowded := _crowding(spec, group_map.world_size):
        progress(crowded)
    started = time.monotonic()
    result = run_job(
        ["workbench.demo.rank", str(out)],
        ranks=group_map.world_size,
        log_dir=out / "logs",
        timeout_s=spec.limit_s,
        environment={},
        on_progress=progress,
    )
    if result.timed_out:
        raise DemoError(f"the job ran longer than {spec.limit_s:g} s and was ended; raise --limit or lower the sizes")
    if result.status != 0:
        first = result.failure
        story = f"world rank {first.world_rank} failed first: {first.message}" if first else "torchrun itself ended"
        log = out / "logs" / "output.log"
        trace = first.traceback if first and first.traceback else "".join(_last_lines(log))
        raise DemoError(f"{story}; all output: {log}\n{trace}".rstrip())
    shutil.rmtree(out / "logs", ignore_errors=True)
    found = json.loads((out / "result.json").read_text())
    document = _document(spec, group_map.world_size, found)
    progress("writing the report")
    document["report"] = str(write_report(out, spec, group_map, document))
    document["elapsed_s"] = round(time.monotonic() - started, 2)
    return document


def _last_lines(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines(keepends=True)[-12:] if log.exists() else []


def _document(spec: DemoSpec, world_size: int, found: dict[str, Any]) -> dict[str, Any]:
    """The JSON document. `fused_us`, `steps_us` and `unfused_us` of a kind are medians at `tokens`, its first count."""
    groups = {}
    for kind, result in found["kinds"].items():
        head = {s["variant"]: s["median_us"] for s in result["samples"] if s["tokens"] == spec.tokens[0]}
        times = {f"{variant}_us": head[variant] for variant in ("fused", "steps", "unfused")}
        groups[kind] = {**result, "tokens": spec.tokens[0], **times}
    crowded = _crowding(spec, world_size)
    return {
        "schema": 1,
        "version": VERSION,
        "torch": found["torch"],
        "ranks": world_size,
        "device": spec.device,
        "system": spec.system,
        "sizes": spec.sizes,
        "hidden": spec.hidden,
        "dtype": spec.dtype,
        "ok": all(g["ok"] and g["replay_exact"] for g in groups.values()),
        "compared": _compared(spec.device),
        "notes": [*_rejections(groups), *([crowded] if crowded else [])],
        "groups": groups,
    }


def _compared(device: str) -> dict[str, str]:
    """What each time is of: its path and its transport."""
    library = "gloo's all-reduce over TCP" if device == "cpu" else "NCCL's all-reduce"
    return {
        "fused": "all-reduce, add and RMSNorm in one call, on the path named",
        "steps": "that path's all-reduce, then an add, then torch's RMSNorm",
        "unfused": f"{library}, then an add, then torch's RMSNorm",
    }


def _crowding(spec: DemoSpec, world_size: int) -> str:
    """What more ranks than cores or GPUs mean for the times; "" where that is not so."""
    if spec.device == "cuda":
        return tell_crowding(world_size, torch.cuda.device_count(), "GPU")
    return tell_crowding(world_size, count_cores())


def _rejections(groups: dict[str, dict[str, Any]]) -> list[str]:
    """A line for each reason why kinds did not take a faster path. Reasons that differ in ranks alone count as one."""
    found: dict[tuple[str, str, str], tuple[str, list[str]]] = {}
    for kind, group in groups.items():
        choice = group["plan"]["choice"]
        for name, reason in group["plan"]["rejected"]:
            found.setdefault((choice, name, _RANKS.sub("#", reason)), (reason, []))[1].append(kind)
    return [f"{', '.join(k)}: {choice}, not {name}: {why}" for (choice, name, _), (why, k) in found.items()]
