"""The library paths beside ours on two GPUs, as one program: they agree with the contract, replay, give memory back.

    python3 tests/cuda/check_peers_backends.py [--without NAME] [--replays 10000] [--cycles 50]

pair        two ranks, a GPU each: custom, nccl, nccl_window, symm_mem and flashinfer give the bits of the CPU reference
            in their rounding class; a CUDA graph of calls is replayed on data that change, with ranks that come late;
            after many open-close cycles the GPU has its memory back.
four        four ranks, two a GPU, so that two subgroups work at one time: DP2 x TP2 and PP2 x TP2, groups next to each
            other and interleaved. NCCL's paths are not part of it.
virtual     sixteen ranks as one launch on one GPU, through the same kernels.
left-out    FlashInfer's workspace made for [0,1] of four ranks with its group left out: `workbench trace` says so.

Exit 0 if every step ran and nothing was wrong. Needs two Hopper or Blackwell GPUs, and flashinfer-python for its part.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.backends.ranks import GlooChannel
from workbench import GroupMap
from workbench.backends.base import Request, Workspace
from workbench.errors import ResourceError
from workbench.launch.multicast import multicast_switches
from workbench.ops import ALL, Rounding, reference_all_reduce, reference_all_reduce_add_rms_norm
from workbench.ranks import GroupKey
from workbench.runtime.devices import take_gpu

ROOT = Path(__file__).parent.parent.parent
PATHS = ("custom", "nccl", "nccl_window", "symm_mem", "flashinfer")
LIMITS_S = {"pair": 110, "four": 45, "virtual": 30, "left-out": 60}
VIRTUAL = "from workbench.measure import check_virtual_ranks; run = check_virtual_ranks(); print(run); exit(run.wrong)"
EPS = 1e-6
GRACE_BYTES = 4 << 20  # the driver's own granularity, twice


class Checks:
    """Counts; prints what is wrong at once."""

    def __init__(self) -> None:
        self.done, self.wrong = 0, 0

    def that(self, fine: bool, what: str) -> None:
        self.done += 1
        if not fine:
            self.wrong += 1
            print(f"WRONG on world rank {dist.get_rank()}: {what}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--without", action="append", default=[], choices=PATHS)
    parser.add_argument("--replays", type=int, default=10_000)
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--step", choices=("pair", "four"))
    args = parser.parse_args()
    if args.step is None:
        sys.exit(launch())
    paths = [p for p in PATHS if p not in args.without]
    take_gpu()
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=60))
    checks = Checks()
    for step in (agree, replay, give_back) if args.step == "pair" else (subgroups,):
        started = time.monotonic()
        step(checks, paths, args)
        say(f"{args.step}: {step.__name__}: {time.monotonic() - started:.0f} s")
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, (checks.done, checks.wrong))
    say(f"{args.step}: {counts[0][0]} checks a rank over {', '.join(paths)}; wrong by rank: {[w for _, w in counts]}")
    sys.stdout.flush()
    os._exit(1 if any(w for _, w in counts) or not all(n for n, _ in counts) else 0)  # peers' memory may be mapped


def launch() -> int:
    """Run the steps one after the other, each with its own time limit; 0 if all of them ended well."""
    environment = {**os.environ, **multicast_switches(os.environ), "FLASHINFER_DISABLE_JIT": "1"}
    environment["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--local-addr", "127.0.0.1"),
        *("--rdzv-endpoint", "127.0.0.1:0", "--nproc-per-node"),
    ]
    this = [__file__, *sys.argv[1:]]
    with tempfile.TemporaryDirectory() as directory:
        verdict = Path(directory) / "verdict.json"
        trace = [
            *(sys.executable, "-m", "workbench", "trace", "--deadline", "15", "--out", f"{directory}/trace"),
            *("--json", str(verdict), "--", *torchrun, "4", str(ROOT / "tests/cuda/left_out.py")),
        ]
        steps = {
            "pair": [*torchrun, "2", *this, "--step", "pair"],
            "four": [*torchrun, "4", *this, "--step", "four"],
            "virtual": [sys.executable, "-c", VIRTUAL],
            "left-out": trace,
        }
        failed = []
        for name, command in steps.items():
            if name == "left-out" and "flashinfer" in sys.argv[1:]:
                continue
            try:
                status = subprocess.run(
                    command, env=environment, cwd=ROOT, timeout=LIMITS_S[name], check=False
                ).returncode
            except subprocess.TimeoutExpired:
                status = 124
            fine = status == 0 if name != "left-out" else status == 3 and names_the_group(verdict)
            print(f"{name}: exit {status}: {'fine' if fine else 'FAILED'}", flush=True)
            failed += [] if fine else [name]
    return 1 if failed else 0


def names_the_group(verdict: Path) -> bool:
    """True if the first finding is a rendezvous that some members of the world never entered."""
    findings = json.loads(verdict.read_text())["findings"]
    for finding in findings:
        print(f"left-out: {finding['kind']}: {finding['message']}", flush=True)
    return bool(findings) and findings[0]["kind"] == "rendezvous-partial" and findings[0]["ranks"] == [2, 3]


class DeviceChannel(GlooChannel):
    """A channel with the group's NCCL group beside its gloo group, as the runtime's channel has."""

    device = "cuda"

    def __init__(self, key: GroupKey, timeout_s: float) -> None:
        timeout = timedelta(seconds=60)
        super().__init__(key, dist.new_group(list(key.world_ranks), backend="gloo", timeout=timeout), timeout_s)
        self.data_group = dist.new_group(list(key.world_ranks), backend="nccl", timeout=timeout)


def channels(groups: list[tuple[int, ...]], kind: str) -> DeviceChannel:
    """This rank's channel; every rank makes every group. Collective over the world."""
    made = [DeviceChannel(GroupKey(kind, ranks), 20.0) for ranks in groups]
    return next(c for c in made if dist.get_rank() in c.key)


def request(hidden: int, dtype: torch.dtype, rounding: Rounding, max_tokens: int = 300) -> Request:
    return Request(hidden=hidden, dtype=dtype, max_tokens=max_tokens, ops=ALL, rounding=rounding)


def refusals(path: str, channel: DeviceChannel, asked: Request) -> list[str]:
    """What each member's probe says against the path, '' where it is fine. Collective over the group."""
    verdict = importlib.import_module(f"workbench.backends.{path}").probe(asked, channel.key)
    return channel.gather("" if verdict.ok else verdict.reason, what="probe")


@contextmanager
def bound(path: str, channel: DeviceChannel, asked: Request) -> Iterator[Workspace]:
    workspace = importlib.import_module(f"workbench.backends.{path}").bind(channel, asked)
    try:
        yield workspace
    finally:
        torch.cuda.synchronize()
        channel.gather(None, what="meeting")  # nobody unmaps what a peer still reads
        workspace.close()


def agree(checks: Checks, paths: list[str], args: argparse.Namespace) -> None:
    """Every path in every class it declares, against the CPU reference: sums and residuals bit for bit."""
    channel = channels([(0, 1)], "tp")
    ran = dict.fromkeys(paths, 0)
    for path, dtype, rounding, hidden in itertools.product(
        paths, (torch.bfloat16, torch.float16, torch.float32), Rounding, (2880, 7168)
    ):
        asked = request(hidden, dtype, rounding)
        told = refusals(path, channel, asked)
        if path == "flashinfer" and rounding is Rounding.ONCE and dtype is not torch.float32:
            checks.that(all("prepare with rounding='twice'" in t for t in told), f"{path} {dtype} once: {told}")
            continue
        if any(told):
            checks.that(False, f"{path} {dtype} {rounding.value} {hidden}: refused: {told}")
            continue
        try:
            with bound(path, channel, asked) as workspace:
                for tokens in (1, 300, 0, 7, 64, 2):
                    check_call(checks, workspace, channel, asked, tokens, f"{path} {dtype} {rounding.value} {hidden}")
                    ran[path] += 1
        except ResourceError as e:
            checks.that(False, str(e))
    say(f"pair: calls compared: {ran}")


def check_call(
    checks: Checks, workspace: Workspace, channel: DeviceChannel, asked: Request, tokens: int, what: str
) -> None:
    def normal(shape: tuple[int, ...], seed: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(asked.dtype)

    shape = (tokens, asked.hidden)
    parts = [normal(shape, 10 * tokens + r) for r in range(channel.key.size)]
    residual, weight = normal(shape, 10 * tokens + 9), normal(shape[1:], 5)
    mine = parts[channel.key.group_rank(channel.world_rank)].cuda()
    want = reference_all_reduce_add_rms_norm(parts, residual, weight, eps=EPS, weight_bias=1.0, rounding=asked.rounding)
    total = workspace.all_reduce(mine)
    out = workspace.all_reduce_add_rms_norm(mine, residual.cuda(), weight.cuda(), eps=EPS, weight_bias=1.0)
    checks.that(torch.equal(total.cpu(), reference_all_reduce(parts)), f"{what} T={tokens}: sum")
    checks.that(torch.equal(out.residual.cpu(), want.residual), f"{what} T={tokens}: residual")
    tolerance = 4 * torch.finfo(asked.dtype).eps
    near = torch.allclose(out.norm.cpu().float(), want.norm.float(), rtol=tolerance, atol=tolerance)
    checks.that(near, f"{what} T={tokens}: norm")


def replay(checks: Checks, paths: list[str], args: argparse.Namespace) -> None:
    """A graph of calls of four sizes, replayed on data that change each time; at random a rank comes late."""
    channel = channels([(0, 1)], "tp")
    me, hidden = channel.key.group_rank(channel.world_rank), 7168
    dice = random.Random(7 + me)
    for path in paths:
        started = time.monotonic()
        with bound(path, channel, request(hidden, torch.bfloat16, Rounding.TWICE)) as workspace:
            counter, bad = (torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(2))
            weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
            rows = [torch.arange(t * hidden, device="cuda").view(t, hidden) for t in (1, 64, 3, 16)]

            def value(index: torch.Tensor, place: int, counter: torch.Tensor = counter) -> torch.Tensor:
                return ((index + counter * (2 * place + 3)) % 17 - 8).to(torch.bfloat16)

            def body(counter=counter, bad=bad, rows=rows, weight=weight, workspace=workspace, value=value) -> None:
                counter.add_(1)
                for index in rows:
                    residual = value(index, 7)
                    out = workspace.all_reduce_add_rms_norm(
                        value(index, me), residual, weight, eps=EPS, weight_bias=0.0
                    )
                    bad.add_((out.residual != value(index, 0) + value(index, 1) + residual).sum())

            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                body()
            side.synchronize()
            channel.gather(None, what="meeting")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                body()
            channel.gather(None, what="meeting")
            for i in range(args.replays):
                if dice.random() < 0.005:
                    time.sleep(dice.random() * 0.002)
                graph.replay()
                if i % 500 == 499:
                    torch.cuda.synchronize()
            torch.cuda.synchronize()
            checks.that(int(counter) == args.replays + 1, f"{path}: {int(counter)} rounds")
            checks.that(int(bad) == 0, f"{path}: {int(bad)} wrong elements in {args.replays} replays")
            del graph
        say(f"pair: {path}: {args.replays} replays of 4 calls, {time.monotonic() - started:.1f} s")


def give_back(checks: Checks, paths: list[str], args: argparse.Namespace) -> None:
    """Free memory of the GPU after many open-close cycles, beside that after the second."""
    channel = channels([(0, 1)], "tp")
    asked = request(4096, torch.bfloat16, Rounding.TWICE, max_tokens=512)
    x = torch.ones(2, 4096, dtype=torch.bfloat16, device="cuda")
    for path in paths:
        free = []
        for _ in range(args.cycles):
            with bound(path, channel, asked) as workspace:
                workspace.all_reduce(x)
            channel.gather(None, what="meeting")
            torch.cuda.empty_cache()
            channel.gather(None, what="meeting")  # both ranks have let go before either looks
            free.append(torch.cuda.mem_get_info()[0])
        lost = free[1] - free[-1]
        checks.that(lost <= GRACE_BYTES, f"{path}: {lost} bytes less after {args.cycles} cycles than after two")
        say(f"pair: {path}: {args.cycles} open-close cycles, {lost} bytes lost")


def subgroups(checks: Checks, paths: list[str], args: argparse.Namespace) -> None:
    """Two groups of two at one time, two processes a GPU. Members sum 2^world_rank, so that a stranger would show."""
    rank = dist.get_rank()
    layouts = [
        ("DP2 x TP2", {"tp": 2, "dp": 2}, "tp", rank % 2, {(0, 1): 3, (2, 3): 12}),
        ("PP2 x TP2", {"tp": 2, "pp": 2}, "tp", rank % 2, {(0, 1): 3, (2, 3): 12}),
        ("DP2 x TP2, interleaved", {"tp": 2, "dp": 2}, "dp", rank // 2, {(0, 2): 5, (1, 3): 10}),
    ]
    for name, sizes, kind, gpu, sums in layouts:
        torch.cuda.set_device(gpu)
        groups = list(GroupMap.build("vllm", **sizes).groups[kind])
        checks.that(groups == list(sums), f"{name}: groups {groups}")
        channel = channels(groups, kind)
        want = sums[channel.key.world_ranks] + 1
        for path in (p for p in paths if not p.startswith("nccl")):
            asked = request(2880, torch.bfloat16, Rounding.TWICE)
            told = refusals(path, channel, asked)
            checks.that(not any(told), f"{name}: {path} over {channel.key}: refused: {told}")
            if any(told):
                continue
            with bound(path, channel, asked) as workspace:
                for tokens in (1, 64, 3, 300) * 3:
                    if rank == 3:
                        time.sleep(0.002)
                    x = torch.full((tokens, 2880), 2.0**rank, dtype=torch.bfloat16, device="cuda")
                    out = workspace.all_reduce_add_rms_norm(
                        x, torch.ones_like(x), torch.ones_like(x[0]), eps=EPS, weight_bias=0.0
                    )
                    got = out.residual.unique().tolist()
                    checks.that(got == [want], f"{name}: {path} over {channel.key}: {got}, expected {want}")
        say(f"four: {name}: groups {groups} at one time")


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
