"""Times every layout of our CUDA kernels at each size: the algorithm, blocks a row, and when the next kernel may start.

  torchrun --nproc-per-node 2 benchmarks/cuda_layouts.py --out DIR [--hidden 7168] [--tokens 1,2,...] [--limit-s 240]

The method is that of `workbench measure fused`, which compares the chosen layout with other systems; what is right is
for benchmarks/cuda_checks.py. NVLink multicast is not used. Writes layouts_hH.json, anew after each size.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from pathlib import Path

import torch
from cuda_checks import Run, abi, outputs

from workbench.measure import Case, Gives
from workbench.measure.graphs import graph_round, record
from workbench.measure.timing import time_rounds
from workbench.trace import Role, Spread


def layouts(tokens: int, hidden: int, ranks: int) -> list[abi.Choice]:
    """Layouts that fit rows of so many bf16 numbers; two shots only where they can save bytes."""
    found = []
    for algorithm in (abi.PUSH, abi.TWO_SHOT_PUSH) if ranks > 2 else (abi.PUSH,):
        for cluster in (2, 4, 7, 8, 14, 16):
            if hidden // 8 < 32 * cluster or (cluster > 8 and tokens > 64):
                continue
            for trigger in (abi.TRIGGER_AT_START, abi.TRIGGER_AFTER_PUSH) if tokens < 64 else (abi.TRIGGER_AFTER_PUSH,):
                found.append(abi.Choice(cluster, trigger=trigger, algorithm=algorithm))
    return found


def case_of(ours, choice: abi.Choice, tokens: int) -> Case:
    """One layout as a case of the workbench's comparison, on random data."""
    shape = (tokens, ours.hidden)
    x, residual = (torch.randn(shape, device="cuda").to(torch.bfloat16) for _ in range(2))
    weight = torch.randn(ours.hidden, device="cuda").to(torch.bfloat16)
    norm, total = outputs(tokens, ours.hidden, torch.bfloat16)

    def call():
        ours.fused(choice, [x], [residual], weight, [(norm, total)])
        return norm, total

    return Case(
        name=str(choice), label=str(choice), role=Role.PART, gives=Gives.FUSED, x=x, residual=residual, call=call
    )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--lib", help="compiled kernels; default: the package's cache, compiled if they are not there")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--hidden", type=int, default=7168)
    p.add_argument("--tokens", type=lambda s: [int(v) for v in s.split(",")], default=[1 << i for i in range(13)])
    p.add_argument("--calls", type=int, default=20)
    p.add_argument("--rounds", type=int, default=30)
    p.add_argument("--limit-s", type=float, default=240)
    args = p.parse_args()
    watch = threading.Timer(args.limit_s, lambda: os._exit(124))
    watch.daemon = True
    watch.start()
    run = Run(args, int(os.environ["RANK"]))
    run.device = "cuda"  # with meet and gather, what the measure room asks of a meeting
    ours = run.workspace(args.hidden, torch.bfloat16, capacity=max(args.tokens))
    table: dict[str, dict[str, dict[str, float]]] = {}
    for tokens in args.tokens:
        rounds = {}
        for choice in layouts(tokens, args.hidden, run.ranks):
            case = case_of(ours, choice, tokens)
            recorded = record(run, case, case.call, args.calls)
            rounds[case.name] = graph_round(run, recorded, lambda: None)
        times = time_rounds(run, rounds, num_rounds=args.rounds)
        table[str(tokens)] = {name: Spread.of(us).to_json() for name, us in times.items()}
        order = sorted(table[str(tokens)].items(), key=lambda item: item[1]["median"])
        run.say(f"hidden {args.hidden}, {tokens} tokens:", *(f"{us['median']:.2f} {name};" for name, us in order[:4]))
        if run.rank == 0:
            args.out.mkdir(parents=True, exist_ok=True)
            about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "ranks": run.ranks}
            text = json.dumps({"schema": 1, **about, "hidden": args.hidden, "us": table}, indent=1)
            (args.out / f"layouts_h{args.hidden}.json").write_text(text)
    sys.stdout.flush()
    os._exit(0)  # no teardown: every rank's memory is mapped by others


if __name__ == "__main__":
    main()
