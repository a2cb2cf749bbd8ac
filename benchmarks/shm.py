"""The shared-memory kernel beside the unfused chain on gloo (all-reduce, add, RMS norm). Back-to-back calls.

    python -m benchmarks.shm [--ranks 2] [--hidden 7168] [--tokens 1,8,64,512] [--dtype bfloat16] [--json]

Every result is compared with the reference before anything is timed. A round times a batch of calls of each candidate
in turn; a batch counts with its slowest rank, a candidate with its best round. One torch thread a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from workbench.backends import shm
from workbench.backends.base import Request
from workbench.ops import ALL, Rounding, reference_all_reduce_add_rms_norm
from workbench.ranks import GroupKey

EPS = 1e-6
ROUNDS = 3


class Channel:
    """The backend's channel over the default gloo group."""

    def __init__(self) -> None:
        self.key = GroupKey("bench", tuple(range(dist.get_world_size())))
        self.world_rank = dist.get_rank()
        self.torch_group = dist.group.WORLD
        self.timeout_s = 60.0

    def gather(self, value: Any) -> list[Any]:
        told: list[Any] = [None] * self.key.size
        dist.all_gather_object(told, value)
        return told


def batch_us(call: Callable[[], object], num_calls: int) -> float:
    """Microseconds a call, over one batch, of the slowest rank. Collective."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(num_calls):
        call()
    elapsed = torch.tensor([(time.perf_counter() - started) / num_calls * 1e6], dtype=torch.float64)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return float(elapsed)


def measure(workspace: shm.ShmWorkspace, tokens: int) -> dict[str, float]:
    """Check, then time, the chain on gloo and both ways into the kernel. Collective."""
    request = workspace.request
    shape, dtype, rank = (tokens, request.hidden), request.dtype, dist.get_rank()

    def drawn(seed: int, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)

    xs = [drawn(100 + r, *shape) for r in range(dist.get_world_size())]
    residual, weight = drawn(1, *shape), drawn(2, request.hidden)
    copied = xs[rank]
    in_place = workspace.empty(shape, dtype)
    in_place.copy_(copied)
    chained = torch.zeros(shape, dtype=dtype)  # zeros, because the chain adds into it again and again

    expected = reference_all_reduce_add_rms_norm(xs, residual, weight, eps=EPS)
    for x in (copied, in_place):
        out = workspace.all_reduce_add_rms_norm(x, residual, weight, eps=EPS, weight_bias=0.0)
        assert torch.equal(out.residual, expected.residual), "the residual differs from the reference"
        torch.testing.assert_close(out.norm, expected.norm)

    def chain() -> torch.Tensor:
        dist.all_reduce(chained)
        return torch.nn.functional.rms_norm(chained + residual, (request.hidden,), weight, EPS)

    def kernel(x: torch.Tensor) -> Callable[[], object]:
        return lambda: workspace.all_reduce_add_rms_norm(x, residual, weight, eps=EPS, weight_bias=0.0)

    candidates = {"gloo": chain, "shm_copied": kernel(copied), "shm_in_place": kernel(in_place)}
    few = tokens > 64
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(ROUNDS):
        for name, call in candidates.items():
            num_calls = (10 if few else 100) if name == "gloo" else (30 if few else 1000)
            best[name] = min(best[name], batch_us(call, num_calls))
    return best


def rank_main(rank: int, options: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks, timeout=timedelta(seconds=120)
    )
    request = Request(
        hidden=options.hidden,
        dtype=getattr(torch, options.dtype),
        max_tokens=max(options.tokens),
        ops=ALL,
        rounding=Rounding.ONCE,
    )
    workspace = shm.bind(Channel(), request)
    rows = [{"tokens": tokens, **measure(workspace, tokens)} for tokens in options.tokens]
    dist.barrier()
    workspace.close()
    if rank == 0:
        report(options, rows)
    dist.barrier()
    dist.destroy_process_group()


def report(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        row["copied_ratio"] = row["gloo"] / row["shm_copied"]
        row["in_place_ratio"] = row["gloo"] / row["shm_in_place"]
    if options.json:
        about = {"ranks": options.ranks, "hidden": options.hidden, "dtype": options.dtype, "torch": torch.__version__}
        about |= {"cpus": os.cpu_count(), "machine": platform.machine(), "load": os.getloadavg()[0], "unit": "us"}
        json.dump({"schema": 1, **about, "rows": rows}, sys.stdout, indent=1)
        print()
        return
    print(f"{options.ranks} ranks, hidden {options.hidden}, {options.dtype}, us a call, load {os.getloadavg()[0]:.1f}")
    print("| tokens | gloo + add + norm | shm, copied in | times | shm, in place | times |")
    print("|---:|---:|---:|---:|---:|---:|")
    for r in rows:
        print(
            f"| {r['tokens']} | {r['gloo']:.1f} | {r['shm_copied']:.1f} | {r['copied_ratio']:.1f}x "
            f"| {r['shm_in_place']:.1f} | {r['in_place_ratio']:.1f}x |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 64, 512])
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        mp.start_processes(rank_main, args=(options, f"{directory}/store"), nprocs=options.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
