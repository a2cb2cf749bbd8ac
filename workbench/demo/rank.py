"""What each rank of the demo does. Run by torchrun: `python -m workbench.demo.rank SPEC_DIRECTORY`."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from workbench.demo.check import EPS, check_capture, check_group, make_inputs
from workbench.demo.directory import write_private
from workbench.demo.spec import DemoSpec
from workbench.launch import PROGRESS, end_with_starter
from workbench.measure import Steps, Unfused, alternate
from workbench.ranks import GroupMap
from workbench.runtime import Session
from workbench.runtime.devices import take_gpu


@record
def main() -> None:
    """Check with a trace, then measure without one; world rank 0 writes result.json."""
    end_with_starter()
    out = Path(sys.argv[1])
    spec = DemoSpec.load(out / "spec.json")
    if spec.device == "cuda":
        take_gpu()
    group_map = spec.group_map()
    kinds = kinds_with_peers(group_map)
    results: dict[str, dict[str, Any]] = {}
    with Session(group_map, device=spec.device, timeout_s=spec.timeout_s, trace_dir=str(out / "trace")) as session:
        say(f"groups made, for {len(kinds)} kind{'' if len(kinds) == 1 else 's'} with more than one rank")
        for kind in kinds:
            results[kind] = _check(session, kind, spec)
            say(f"checked {kind}")
        dtype = getattr(torch, spec.dtype)
        for kind in kinds:
            exact = check_capture(session, kind, hidden=spec.hidden, dtype=dtype)
            results[kind]["replay_exact"] = all(_world(session, exact))
        say("captured and replayed")
    with Session(group_map, device=spec.device, timeout_s=spec.timeout_s) as session:
        for kind in kinds:
            results[kind]["samples"] = _measure(session, kind, spec)
            say(f"measured {kind}")
    if session.world_rank == 0:
        write_private(out / "result.json", json.dumps({"kinds": results, "torch": torch.__version__}))


def kinds_with_peers(group_map: GroupMap) -> list[str]:
    """The kinds worth showing: some list has several ranks and all ranks belong; `world` only if nothing equals it."""
    lists = {
        kind: ranks
        for kind, ranks in group_map.groups.items()
        if any(len(r) > 1 for r in ranks) and sum(len(r) for r in ranks) == group_map.world_size
    }
    if any(kind != "world" and ranks == lists.get("world") for kind, ranks in lists.items()):
        lists.pop("world")
    return list(lists)


def say(text: str) -> None:
    """One line of progress, from world rank 0 alone."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{PROGRESS}{text}", flush=True)


def _check(session: Session, kind: str, spec: DemoSpec) -> dict[str, Any]:
    dtype = getattr(torch, spec.dtype)
    plan = session.prepare(kind, hidden=spec.hidden, dtype=dtype, max_tokens=max(spec.tokens))
    checks = [
        check_group(session, kind, tokens=t, hidden=spec.hidden, dtype=dtype, seed=spec.seed)
        for t in sorted({0, 1, 7, *spec.tokens})
        if t <= max(spec.tokens)
    ]
    mine = {
        "ok": all(c.ok for c in checks),
        "bit_equal": all(c.bit_equal for c in checks),
        "exact": all(c.exact for c in checks),
        "max_error": max(c.max_error for c in checks),
    }
    everyone = _world(session, mine)
    return {
        "ranks": [list(r) for r in session.group_map.groups[kind]],
        "plan": plan.to_json(),
        "ok": all(e["ok"] for e in everyone),
        "bit_equal": all(e["bit_equal"] for e in everyone),
        "exact": all(e["exact"] for e in everyone),
        "max_error": max(e["max_error"] for e in everyone),
    }


def _measure(session: Session, kind: str, spec: DemoSpec) -> list[dict[str, Any]]:
    dtype = getattr(torch, spec.dtype)
    key = session.group(kind)
    session.prepare(kind, hidden=spec.hidden, dtype=dtype, max_tokens=max(spec.tokens))
    rows = []
    for tokens in spec.tokens:
        inputs = make_inputs(
            key,
            session.world_rank,
            tokens=tokens,
            hidden=spec.hidden,
            dtype=dtype,
            device=torch.device(session.device),
            seed=spec.seed,
        )
        x = session.empty(tuple(inputs.x.shape), dtype, group=kind)
        x.copy_(inputs.x)
        steps = Steps(session, kind, x, inputs.residual, inputs.weight, eps=EPS)
        unfused = Unfused(session, kind, inputs.x, inputs.residual, inputs.weight, eps=EPS)

        def fused(x: torch.Tensor = x, inputs: Any = inputs) -> None:
            session.all_reduce_add_rms_norm(x, inputs.residual, inputs.weight, eps=EPS, group=kind)

        calls = min(20, int(100 / math.log2(max(key.size, 2))))  # sums of the unfused scratch stay finite
        timed = alternate(
            session,
            kind,
            {"fused": (lambda: None, fused), "steps": (lambda: None, steps), "unfused": (unfused.reset, unfused)},
            tokens=tokens,
            calls=calls,
            rounds=spec.rounds,
        )
        everyone = _world(session, [sample.to_json() for sample in timed])
        rows += [max((e[i] for e in everyone), key=lambda s: s["median_us"]) for i in range(len(timed))]
        del x, steps  # its memory goes back to the workspace
    return rows


def _world(session: Session, value: Any) -> list[Any]:
    """Every rank's value. Collective over all ranks."""
    out: list[Any] = [None] * session.group_map.world_size
    dist.all_gather_object(out, value)
    return out


if __name__ == "__main__":
    main()
