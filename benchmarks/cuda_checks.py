"""Checks of our CUDA kernels on real GPUs, one process a GPU: every path, hostile data, delays, missing ranks, memory.

  torchrun --nproc-per-node 2 benchmarks/cuda_checks.py [--lib FILE] [--steps check,virtual,...] [--limit-s 240]

Steps: `check` real ranks against a reference, by both algorithms and both kinds of shared memory; `virtual` 2 to 16
ranks on one device; `missing` a rank that stays away; `memory` the workbench's own binding, what it allocates and
gives back, who is named; `speed` whether the kinds of memory differ; `soak` replays of a graph of mixed calls while
ranks come late, as long as --soak-s allows; `two` two groups at one time on two streams; `memcheck` virtual ranks under
compute-sanitizer. Nothing of it uses NVLink multicast. The last line is OK or WRONG, the exit status 0 or 1.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from cuda_kernels import (
    EPS,
    TOLERANCE,
    Checks,
    Ours,
    abi,
    check_call,
    data,
    norm_error,
    outputs,
)

__all__ = ["EPS", "TOLERANCE", "Checks", "Ours", "abi", "check_call", "norm_error", "outputs"]
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TWO = abi.TWO_SHOT_PUSH
CHOICES = [
    abi.Choice(7),
    abi.Choice(2),
    abi.Choice(3, max_lanes=64),
    abi.Choice(4, trigger=2),
    abi.Choice(8, trigger=0),
    abi.Choice(4, algorithm=TWO),
    abi.Choice(7, max_lanes=5, trigger=2, algorithm=TWO),
]
VIRTUAL_CHOICES = (abi.Choice(7), abi.Choice(2, algorithm=TWO), abi.Choice(2), abi.Choice(4, algorithm=TWO))
HIDDENS = {
    torch.bfloat16: (7168, 4096, 2880, 7176, 8, 16384),
    torch.float16: (7168, 5120),
    torch.float32: (4096, 2880),
}


def step_check(run):
    """Real ranks: dtypes, hidden sizes; tokens, choices and algorithms mixed on one workspace; every bit pattern."""
    checks, seed = Checks(), itertools.count(1)
    for share, sizes in ((abi.FD, HIDDENS), (abi.IPC, {torch.bfloat16: (7168,), torch.float32: (2880,)})):
        for dtype, hidden in ((d, h) for d, hs in sizes.items() for h in hs):
            ours = run.workspace(hidden, dtype, share=share)
            call = partial(check_call, checks, ours)
            name = f"{dtype} {hidden} share {share}"
            for tokens in (1, 300, 2, 0, 129, 5, 700, 3, 64, 1):
                for choice in CHOICES:
                    if hidden // (4 if dtype == torch.float32 else 8) > 1024 * choice.cluster:
                        continue
                    for kind in ("normal", "bits") if tokens else ("normal",):
                        call(choice, kind, tokens, next(seed), what=name)
                for choice in (CHOICES[4], CHOICES[6]):
                    call(choice, "integers", tokens, next(seed), what=f"{name} reduce", reduce=True)
                    call(choice, "normal", tokens, next(seed), what=f"{name} twice", round_twice=True)
                    call(choice, "normal", tokens, next(seed), what=f"{name} bias", weight_bias=1.0, inplace=True)
            ours.free(run.meet)
    return checks


def step_virtual(run):
    """2..16 ranks of one process on one device, each rank's bits equal; a rank that never comes is named."""
    checks, seed = Checks(), itertools.count(1000)
    for ranks in (16, 8, 6, 4, 3, 2)[run.rank :: run.ranks]:  # each real rank plays some of them on its own device
        for dtype, hidden in ((torch.bfloat16, 7168), (torch.float16, 2880), (torch.float32, 4096)):
            ours = Ours(run.kernels, ranks=ranks, rank=0, hidden=hidden, dtype=dtype, capacity=64)
            for tokens in (1, 9, 2, 33, 5, 0, 16, 64, 3):
                for choice in (
                    abi.Choice(7),
                    abi.Choice(2, algorithm=TWO),
                    abi.Choice(2),
                    abi.Choice(4, algorithm=TWO),
                ):
                    call = partial(check_call, checks, ours, choice, what=f"virtual {ranks} {dtype}")
                    if tokens:
                        call("bits", tokens, next(seed))
                    call("normal", tokens, next(seed), round_twice=bool(tokens % 2), inplace=tokens > 9)
                    call("integers", tokens, next(seed), reduce=True)
            ours.free()
        for choice in (abi.Choice(4), abi.Choice(4, algorithm=TWO)):
            absent_virtual(run, checks, ranks, choice)
    return checks


def absent_virtual(run, checks, ranks, choice):
    """The last rank never comes: every other one reports it, once."""
    tokens, hidden = 2 * ranks, 2880
    ours = Ours(run.kernels, ranks=ranks, rank=0, hidden=hidden, dtype=torch.bfloat16, capacity=64, timeout_s=0.02)
    parts, residual = data("normal", ranks, tokens, hidden, torch.bfloat16, 3)
    outs = [outputs(tokens, hidden, torch.bfloat16) for _ in range(ranks)]
    weight = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
    ours.fused(choice, parts, [residual] * ranks, weight, outs, only=ranks - 1)
    torch.cuda.synchronize()
    got = [(r.rank, r.peer) for r in ours.reports()]
    checks.that(got == [(r, ranks - 1) for r in range(ranks - 1)], f"virtual {ranks} {choice}: reports {got}")
    ours.free()


def step_missing(run):
    """Rank 1 stays away: rank 0's kernel ends at its bound and names it, later calls leave at once, the GPU works."""
    checks = Checks()
    for choice in (abi.Choice(2), abi.Choice(2, algorithm=TWO)):
        ours = run.workspace(7168, torch.bfloat16, timeout_s=0.05)
        for before in (abi.Choice(7), choice):
            check_call(checks, ours, before, "normal", 300, 5, what="before")
        if run.rank == 0:
            for tokens in (2, 300):
                parts, residual = data("normal", run.ranks, tokens, 7168, torch.bfloat16, 1)
                weight = torch.ones(7168, dtype=torch.bfloat16, device="cuda")
                outs = outputs(tokens, 7168, torch.bfloat16)
                start = time.monotonic()
                ours.fused(choice, [parts[0]], [residual], weight, [outs])
                torch.cuda.synchronize()
                took = time.monotonic() - start
                checks.that(took < (2.0 if tokens == 2 else 0.04), f"missing: {tokens} tokens took {took:.3f} s")
            reports = [(r.rank, r.peer, r.op, r.expected - r.seen) for r in ours.reports()]
            checks.that(reports == [(0, 1, 2, 1)], f"missing: {reports}")
            a = torch.ones(512, 512, device="cuda")
            checks.that(float((a @ a)[0, 0]) == 512.0, "missing: GPU unusable afterwards")
        run.meet()
        ours.free(run.meet)
    return checks


def replays(run, checks, rounds, seconds):
    """A graph of calls of alternating sizes and algorithms whose data change on every replay; ranks come late."""
    hidden, device = 7168, "cuda"
    ours = run.workspace(hidden, torch.bfloat16)
    plan = [
        (1, abi.Choice(7)),
        (300, abi.Choice(2)),
        (3, abi.Choice(7, algorithm=TWO)),
        (64, abi.Choice(2)),
        (2, abi.Choice(4)),
        (161, abi.Choice(4, algorithm=TWO)),
        (160, abi.Choice(2, max_lanes=64)),
    ]
    counter = torch.zeros((), dtype=torch.int64, device=device)
    bad = torch.zeros((), dtype=torch.int64, device=device)
    weight = torch.ones(hidden, device=device, dtype=torch.bfloat16)
    cases = []
    for tokens, choice in plan:
        index = torch.arange(tokens * hidden, device=device, dtype=torch.int32).view(tokens, hidden) % 17
        x, residual = (torch.empty(tokens, hidden, dtype=torch.bfloat16, device=device) for _ in range(2))
        cases.append((index, x, residual, choice, outputs(tokens, hidden, torch.bfloat16)))

    def value(index, r):
        return ((index + (counter * (2 * r + 3)) % 17) % 17 - 8).to(torch.bfloat16)

    def body():
        counter.add_(1)
        for index, x, residual, _, _ in cases:
            x.copy_(value(index, run.rank))
            residual.copy_(value(index, 7))
        for _, x, residual, choice, outs in cases:
            ours.fused(choice, [x], [residual], weight, [outs])
        for index, _, _, _, outs in cases:
            want = sum(value(index, r) for r in range(run.ranks)) + value(index, 7)
            bad.add_((outs[1] != want).sum())

    body()
    torch.cuda.synchronize()
    run.meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    dice, done, start = random.Random(7 + run.rank), 0, time.monotonic()
    while done < rounds and max(run.gather(time.monotonic() - start)) < seconds:
        for _ in range(500):
            if dice.random() < 0.02:
                most = 3_000_000 if dice.random() < 0.05 else 60_000
                run.kernels.delay(dice.randrange(1000, most), torch.cuda.current_stream().cuda_stream)
            graph.replay()
        torch.cuda.synchronize()
        done += 500
    run.say(f"  {done} replays of {len(plan)} calls, one rank late in 2 % of them, in {time.monotonic() - start:.0f} s")
    checks.that(int(counter) == done + 1, f"replays: {int(counter)} rounds")
    checks.that(int(bad) == 0, f"replays: {int(bad)} wrong elements in {done} replays")
    checks.that(not ours.reports(), "replays: a kernel gave up")
    ours.free(run.meet)


def step_soak(run):
    """Up to --replays graph replays, as long as --soak-s allows."""
    checks = Checks()
    replays(run, checks, run.args.replays, run.args.soak_s)
    return checks


def channel_of(run, timeout_s=20.0, kind="tp"):
    """What custom.bind needs of a group: this program's ranks."""
    from workbench.ranks import GroupKey

    class Channel:
        key = GroupKey(kind, tuple(range(run.ranks)))
        world_rank, torch_group = run.rank, run.gloo

        def gather(self, value, *, what):  # noqa: ARG002 - the protocol's signature
            return run.gather(value)

    channel = Channel()
    channel.timeout_s = timeout_s
    return channel


def request_of(max_tokens, hidden=7168, **more):
    from workbench.backends.base import Request
    from workbench.ops import ALL, Rounding

    return Request(hidden=hidden, dtype=torch.bfloat16, max_tokens=max_tokens, ops=ALL, rounding=Rounding.ONCE, **more)


def step_two(run):
    """Two groups at one time on two streams, launched in opposite order on the ranks, in large calls."""
    from workbench.backends import custom

    checks, hidden, tokens = Checks(), 7168, 2000
    bound = [custom.bind(channel_of(run, 5.0, k), request_of(tokens, concurrent_groups=2)) for k in ("tp", "ep")]
    streams = [torch.cuda.Stream() for _ in bound]
    bad = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in bound]
    weight = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
    cases = []
    for i, _ in enumerate(bound):
        parts, residual = data("integers", run.ranks, tokens, hidden, torch.bfloat16, 50 + i)
        cases.append((parts[run.rank], residual, sum(p.float() for p in parts).add(residual.float()).bfloat16()))
    torch.cuda.synchronize()

    def call(g):
        x, residual, want = cases[g]
        with torch.cuda.stream(streams[g]):
            out = bound[g].all_reduce_add_rms_norm(x, residual, weight, eps=EPS, weight_bias=0.0)
            bad[g].add_((out.residual != want).sum())

    for g in (0, 1, 0, 1):  # what loads a kernel or allocates may wait for the device, so not while groups overlap
        call(g)
        run.meet()
    rounds = 300
    for i in range(rounds):
        for g in (0, 1) if (i + run.rank) % 2 else (1, 0):
            call(g)
        if i % 50 == 49:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    checks.that(sum(map(int, bad)) == 0, f"two groups: {list(map(int, bad))} wrong elements in {rounds} rounds")
    for workspace in bound:
        checks.that(not workspace.broken, f"two groups: {workspace.broken}")
        workspace.close()
    run.meet()
    return checks


def step_memory(run):
    """The workbench's binding: which memory, given back at close, IPC where FD is refused, a missing rank by name."""
    from workbench.backends import custom, custom_memory
    from workbench.errors import ClosedError, DeadlineError

    checks, request = Checks(), request_of(512)
    x, residual = (torch.ones(4, 7168, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    weight = torch.ones(7168, dtype=torch.bfloat16, device="cuda")

    def use(workspace, name):
        out = workspace.all_reduce_add_rms_norm(x, residual, weight, eps=EPS, weight_bias=0.0)
        checks.that(bool((out.residual == run.ranks + 1).all()), f"memory: sum over {name}")
        torch.cuda.synchronize()

    free = []
    for _ in range(4):  # the first one also loads what stays loaded
        workspace = custom.bind(channel_of(run), request)
        checks.that(workspace.memory_kind == "fd", f"memory: shared by {workspace.memory_kind}")
        use(workspace, "fd")
        workspace.close()
        run.meet()
        free.append(torch.cuda.mem_get_info()[0])
    checks.that(len(set(free[1:])) == 1, f"memory: free bytes after each close {free}")

    workspace = custom.bind(channel_of(run), request_of(512, algorithm="two_shot_push"))
    use(workspace, "two shots")
    workspace.close()
    run.meet()

    workspace = custom.bind(channel_of(run), request)

    def layer(x, residual, weight):
        out = workspace.all_reduce_add_rms_norm(x * 1, residual, weight, eps=EPS, weight_bias=0.0)
        return workspace.all_reduce(out.residual)

    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, residual, weight)
    checks.that(bool((got == run.ranks * (run.ranks + 1)).all()), "memory: compiled into one graph")
    workspace.close()
    run.meet()

    class Refused(custom_memory.abi.OwnMemory):
        def __init__(self, *args, **more):
            if more["share"] == abi.FD and run.rank == run.ranks - 1:
                raise custom_memory.abi.KernelError("refused by this check")
            super().__init__(*args, **more)

    kept, custom_memory.abi.OwnMemory = custom_memory.abi.OwnMemory, Refused
    try:
        workspace = custom.bind(channel_of(run), request)
    finally:
        custom_memory.abi.OwnMemory = kept
    checks.that(workspace.memory_kind == "ipc", f"memory: shared by {workspace.memory_kind} where fd is refused")
    use(workspace, "ipc")
    workspace.close()
    run.meet()

    workspace = custom.bind(channel_of(run, timeout_s=0.3), request)
    if run.rank == 0:
        workspace.all_reduce(x)
        torch.cuda.synchronize()
        for kind in (DeadlineError, ClosedError):
            try:
                workspace.all_reduce(x)
                checks.that(False, "memory: a missing rank was not noticed")
            except (DeadlineError, ClosedError) as e:
                checks.that(type(e) is kind and "world rank 1" in str(e), f"memory: {e!r}")
                if kind is DeadlineError:
                    checks.that(e.missing == (1,), f"memory: {e!r}")
                    run.say(f"  {e}")
    run.meet()
    workspace.close()
    workspace = custom.bind(channel_of(run), request)
    use(workspace, "a workspace bound after a failure")
    workspace.close()
    run.meet()
    return checks


def step_speed(run):
    """us a call over each kind of shared memory: graphs of 20 calls, rounds in turns, slower rank. Asserts no time."""
    checks, hidden, reps = Checks(), 7168, 20
    kinds = {name: run.workspace(hidden, torch.bfloat16, capacity=4096, share=s) for s, name in ((1, "fd"), (0, "ipc"))}
    for tokens in (1, 512, 4096):
        (x, *_), residual = data("normal", run.ranks, tokens, hidden, torch.bfloat16, 1 + run.rank)
        weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
        outs, graphs = outputs(tokens, hidden, torch.bfloat16), {}
        for name, ours in kinds.items():
            call = partial(ours.fused, abi.choose(tokens, hidden, 2), [x], [residual], weight, [outs])
            call()
            torch.cuda.synchronize()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name]):
                for _ in range(reps):
                    call()
        times = {name: [] for name in kinds}
        for _ in range(15):
            for name, graph in graphs.items():
                run.meet()
                graph.replay()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times[name].append(begin.elapsed_time(end) * 1e3 / reps)
        found = {name: round(max(run.gather(statistics.median(t))), 2) for name, t in times.items()}
        run.say(f"  {tokens} tokens, us: {found}")
        checks.that(not any(ours.reports() for ours in kinds.values()), "speed: a kernel gave up")
    for ours in kinds.values():
        ours.free(run.meet)
    return checks


def step_memcheck(run):
    """Virtual ranks under compute-sanitizer's memcheck, by rank 0."""
    checks = Checks()
    if run.rank == 0:
        tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        program = [sys.executable, "tests/kernels_cuda/virtual_small.py", run.kernels.path, "--short"]
        line = [tool, "--tool", "memcheck", "--error-exitcode", "9", *program]
        try:
            done = subprocess.run(
                line, cwd=ROOT, capture_output=True, text=True, timeout=run.args.memcheck_s, check=False
            )
            told = (done.stdout + done.stderr).strip().splitlines()[-6:]
            fine = done.returncode == 0 and "0 errors" in done.stdout + done.stderr
        except (OSError, subprocess.TimeoutExpired) as e:
            told, fine = [str(e)], False
        run.say("  " + "\n  ".join(told))
        checks.that(fine, f"memcheck: {told}")
    run.meet()
    return checks


STEPS = {
    "check": step_check,
    "virtual": step_virtual,
    "missing": step_missing,
    "memory": step_memory,
    "speed": step_speed,
    "soak": step_soak,
    "two": step_two,
    "memcheck": step_memcheck,
}


class Run:
    """This process among the ranks: settings, groups, the library."""

    def __init__(self, args, rank):
        torch.cuda.set_device(rank)
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=150))
        self.begun = time.monotonic()
        self.args, self.rank, self.ranks, self.gloo = args, dist.get_rank(), dist.get_world_size(), dist.group.WORLD
        self.kernels = abi.Kernels(args.lib or self.build())

    def build(self):
        from workbench.backends.custom_build import build_cuda

        return build_cuda("{}{}a".format(*torch.cuda.get_device_capability()))

    def say(self, *words):
        if self.rank == 0:
            print(*words, flush=True)

    def gather(self, value):
        every = [None] * self.ranks
        dist.all_gather_object(every, value, group=self.gloo)
        return every

    def meet(self):
        torch.cuda.synchronize()
        dist.barrier(group=self.gloo)

    def workspace(self, hidden, dtype, **more):
        return Ours(
            self.kernels, ranks=self.ranks, rank=self.rank, hidden=hidden, dtype=dtype, gather=self.gather, **more
        )


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--lib", help="compiled kernels; default: the package's cache, compiled if they are not there")
    p.add_argument("--steps", default=",".join(STEPS))
    p.add_argument("--replays", type=int, default=100_000)
    p.add_argument("--soak-s", type=float, default=45)
    p.add_argument("--memcheck-s", type=float, default=90)
    p.add_argument("--limit-s", type=float, default=240, help="of the whole program; what has not run by then is WRONG")
    args = p.parse_args()
    rank, begun = int(os.environ["RANK"]), time.monotonic()

    def expire():
        print(f"rank {rank}: WRONG: stopped by --limit-s", flush=True)
        os._exit(124)

    dog = threading.Timer(args.limit_s, expire)
    dog.daemon = True
    dog.start()
    run, wrong = Run(args, rank), []
    for step in args.steps.split(","):
        start = time.monotonic()
        checks = STEPS[step](run)
        every = run.gather((checks.done, checks.wrong))
        failed = [w for _, ws in every for w in ws] + ([] if sum(d for d, _ in every) else ["checked nothing"])
        wrong += [f"{step}: {w}" for w in failed]
        run.say(f"{step}: {sum(d for d, _ in every)} checks, {len(failed)} wrong, {time.monotonic() - start:.1f} s")
    for w in wrong[:20]:
        run.say("WRONG", w)
    where = f"{run.ranks} x {torch.cuda.get_device_name()}"
    run.say(f"{'WRONG' if wrong else 'OK'} after {time.monotonic() - begun:.0f} s on {where}")
    sys.stdout.flush()
    os._exit(1 if wrong else 0)  # no teardown: a rank may wait for one that failed


if __name__ == "__main__":
    main()
