"""Checks the CUDA kernels on real GPUs, one process a GPU, and times their layouts against each other.

  torchrun --nproc-per-node 2 benchmarks/fused_cuda.py --steps check,virtual,backend,tune --out DIR

Steps: `check` real ranks against an fp64 reference and exact residual bits; `virtual` the same with 2..16 ranks on one
device; `backend` the workbench's own face over the kernels; `tune` every layout at each size. Other systems are timed
beside ours by `workbench measure fused`. NVLink multicast stays off. `--lib` names a compiled library; default: compile
it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
os.environ.update(NO_MULTICAST)

import torch  # noqa: E402 - after the environment
import torch.distributed as dist  # noqa: E402 - after the environment
from cuda_checks import (  # noqa: E402 - likewise
    EPS,
    TOLERANCE,
    Checks,
    Ours,
    abi,
    norm_error,
    outputs,
    step_check,
    step_virtual,
)


def step_tune(run):
    """us of every layout at each size: blocks a row, and when the next kernel may start."""
    from workbench.measure.graphs import graph_round, record
    from workbench.measure.timing import time_rounds
    from workbench.trace import Spread

    table, hidden = {}, run.args.hidden
    ours = run.workspace(hidden, torch.bfloat16, capacity=max(run.args.tokens))
    for tokens in run.args.tokens:
        given = run.tensors(tokens)
        rounds = {}
        for cluster in (2, 4, 7, 8, 14, 16):
            if hidden // 8 < 32 * cluster or (cluster > 8 and tokens > 64):
                continue
            for trigger in (0, 1) if tokens < 64 else (1,):
                case = layout_case(ours, abi.Choice(cluster, trigger=trigger), given)
                recorded = record(run, case, case.call, run.args.reps)
                rounds[case.name] = graph_round(run, recorded, lambda: None)
        times = time_rounds(run, rounds, num_rounds=run.args.iters)
        table[str(tokens)] = {name: Spread.of(us).to_json() for name, us in times.items()}
        order = sorted(table[str(tokens)].items(), key=lambda item: item[1]["median"])
        run.say(f"h{hidden} T{tokens}: " + "  ".join(f"{name}={us['median']:.2f}" for name, us in order))
        run.write(f"tune_h{hidden}.json", {"meta": run.meta(), "us": table})
    ours.free(run.meet)


def layout_case(ours, choice, given):
    """One layout as a case of the workbench's comparison."""
    from workbench.measure.case import Case, Gives
    from workbench.trace import Role

    x, residual, weight, norm, total = given

    def call():
        ours.fused(choice, [x], [residual], weight, [(norm, total)])
        return norm, total

    name = f"c{choice.cluster} t{choice.trigger}"
    return Case(name=name, label=name, role=Role.PEER, gives=Gives.FUSED, x=x, residual=residual, call=call)


def step_backend(run):
    """The workbench's backend: probe, bind, calls, capture, torch.compile, close and bind anew, a missing member."""
    from workbench.backends import custom
    from workbench.backends.base import Request
    from workbench.errors import ClosedError, DeadlineError, ResourceError
    from workbench.ops import ALL, Rounding
    from workbench.ranks import GroupKey

    class Channel:
        def __init__(self, timeout_s):
            self.key = GroupKey("tp", tuple(range(run.ranks)))
            self.world_rank, self.timeout_s, self.torch_group = run.rank, timeout_s, run.gloo

        def gather(self, value, *, what=""):  # noqa: ARG002 - the signature of every channel
            return run.gather(value)

    checks = Checks()
    for dtype, rounding in (
        (torch.bfloat16, Rounding.ONCE),
        (torch.float16, Rounding.TWICE),
        (torch.float32, Rounding.ONCE),
    ):
        request = Request(hidden=2880, dtype=dtype, max_tokens=300, ops=ALL, rounding=rounding)
        channel = Channel(30.0)
        verdict = custom.probe(request, channel.key)
        checks.that(verdict.ok, f"probe: {verdict.reason}")
        workspace = custom.bind(channel, request)
        for tokens in (0, 1, 300, 7):
            parts, residual, weight, want_sum, want_total, want_norm = run.expected(tokens, 2880, dtype, rounding)
            got = workspace.all_reduce(parts[run.rank])
            checks.that(torch.equal(got, want_sum), f"backend {dtype} {tokens}: sum")
            out = workspace.all_reduce_add_rms_norm(parts[run.rank], residual, weight, eps=EPS, weight_bias=1.0)
            checks.that(torch.equal(out.residual, want_total), f"backend {dtype} {tokens}: residual")
            off = norm_error(out.norm, want_norm)
            checks.that(off <= TOLERANCE[dtype], f"backend {dtype} {tokens}: norm off by {off}")
        run.meet()

        def model(x, residual, weight, workspace=workspace):
            out = workspace.all_reduce_add_rms_norm(x * 1, residual, weight, eps=EPS, weight_bias=1.0)
            return out.norm, workspace.all_reduce(out.residual)

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(parts[run.rank], residual, weight)
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        checks.that(torch.equal(captured[1], (want_total.float() * run.ranks).to(dtype)), f"backend {dtype}: captured")
        if dtype is torch.bfloat16:
            compiled = torch.compile(model, fullgraph=True)(parts[run.rank], residual, weight)
            checks.that(torch.equal(compiled[1], captured[1]), "backend: compiled")
        workspace.close()
        workspace.close()
        try:
            workspace.all_reduce(parts[run.rank])
            checks.that(False, "backend: a closed workspace took a call")
        except ClosedError:
            checks.that(True, "closed")
        run.meet()

    class OneBad(Channel):
        def gather(self, value, *, what=""):  # noqa: ARG002 - the signature of every channel
            if isinstance(value, dict) and run.rank == run.ranks - 1:
                value = {"error": "no memory, says this test"}
            return run.gather(value)

    try:
        custom.bind(OneBad(30.0), request)
        checks.that(False, "backend: a failed member was not noticed")
    except ResourceError as e:
        checks.that(f"world rank {run.ranks - 1}: no memory" in str(e), f"backend: {e}")
    request = Request(hidden=2880, dtype=torch.bfloat16, max_tokens=4, ops=ALL, rounding=Rounding.ONCE)
    workspace = custom.bind(Channel(0.3), request)
    if run.rank == 0:
        parts, *_ = run.expected(2, 2880, torch.bfloat16, Rounding.ONCE)
        start = time.monotonic()
        workspace.all_reduce(parts[0])
        torch.cuda.synchronize()
        took = time.monotonic() - start
        checks.that(took < 3.0, f"backend: a missing member took {took:.2f} s")
        for kind in (DeadlineError, ClosedError):
            try:
                workspace.all_reduce(parts[0])
                checks.that(False, "backend: a missing member was not noticed")
            except (DeadlineError, ClosedError) as e:
                checks.that(type(e) is kind and "world rank 1" in str(e), f"backend: {e!r}")
                run.say("  ", repr(e)[:300])
                checks.that(kind is ClosedError or e.missing == (1,), f"backend: {e!r}")
    run.meet()
    workspace.close()
    return checks


class Run:
    """This process among the ranks: settings, groups, the library. A Meeting of the measure room."""

    def __init__(self, args):
        self.args, self.rank, self.ranks = args, dist.get_rank(), dist.get_world_size()
        self.gloo = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=90))
        self.kernels = abi.Kernels(args.lib or self.build())
        self.out, self.device = Path(args.out), "cuda"
        self.out.mkdir(parents=True, exist_ok=True)

    def build(self):
        from workbench.backends.custom_build import build_cuda

        major, minor = torch.cuda.get_device_capability()
        return build_cuda(f"{major}{minor}a")

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

    def write(self, name, value):
        if self.rank == 0:
            (self.out / name).write_text(json.dumps(value, indent=1))

    def workspace(self, hidden, dtype, **more):
        return Ours(
            self.kernels, ranks=self.ranks, rank=self.rank, hidden=hidden, dtype=dtype, gather=self.gather, **more
        )

    def tensors(self, tokens):
        hidden = self.args.hidden
        gen = torch.Generator(device="cuda").manual_seed(self.rank + 1)
        x, residual = (torch.randn(tokens, hidden, device="cuda", generator=gen).to(torch.bfloat16) for _ in range(2))
        weight = torch.randn(hidden, device="cuda", generator=torch.Generator(device="cuda").manual_seed(0))
        return x, residual, weight.to(torch.bfloat16), *outputs(tokens, hidden, torch.bfloat16)

    def expected(self, tokens, hidden, dtype, rounding):
        """(every rank's x, residual, weight, sum, sum + residual, norm in fp64), from one seed, weight_bias 1."""
        gen = torch.Generator(device="cuda").manual_seed(tokens)
        parts = [torch.randn(tokens, hidden, device="cuda", generator=gen).to(dtype) for _ in range(self.ranks)]
        residual = torch.randn(tokens, hidden, device="cuda", generator=gen).to(dtype)
        weight = torch.randn(hidden, device="cuda", generator=gen).to(dtype)
        total = parts[0].float()
        for p in parts[1:]:
            total = total + p.float()
        kept = total.to(dtype).float() if rounding.value == "twice" else total
        added = (kept + residual.float()).to(dtype)
        wide = added.double()
        norm = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * (1.0 + weight.double())
        return parts, residual, weight, total.to(dtype), added, norm

    def meta(self):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False).stdout.split("\n")[0]
        return {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": torch.cuda.get_device_name(),
            "driver": driver,
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "ranks": self.ranks,
            "hidden": self.args.hidden,
            "dtype": "bfloat16",
            "method": f"CUDA graph of {self.args.reps} calls, {self.args.iters} rounds, layouts in turns, another "
            "replay queued ahead, slowest rank of each round",
            "command": f"torchrun --nproc-per-node {self.ranks} " + " ".join(sys.argv),
        }


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--lib", help="compiled kernels; default: compile them into the package's cache")
    p.add_argument("--steps", default="check")
    p.add_argument("--out", default="out")
    p.add_argument("--hidden", type=int, default=7168)
    p.add_argument("--tokens", type=lambda s: [int(v) for v in s.split(",")], default=[1 << i for i in range(13)])
    p.add_argument("--replays", type=int, default=10000, help="graph replays with one rank late at random")
    p.add_argument("--reps", type=int, default=20)
    p.add_argument("--iters", type=int, default=30)
    p.add_argument("--keep-going", action="store_true", help="later steps even when a check failed")
    p.add_argument("--limit-s", type=float, default=300)
    args = p.parse_args()
    rank = int(os.environ["RANK"])

    def expire():
        print(f"rank {rank}: stopped by --limit-s", flush=True)
        os._exit(124)

    dog = threading.Timer(args.limit_s, expire)
    dog.daemon = True
    dog.start()
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    run, bad = Run(args), 0
    steps = {
        "check": step_check,
        "virtual": step_virtual,
        "backend": step_backend,
        "tune": step_tune,
    }
    for step in args.steps.split(","):
        start = time.monotonic()
        result = steps[step](run)
        if isinstance(result, Checks):
            every = run.gather((result.done, result.wrong))
            bad += sum(len(w) for _, w in every) + (sum(d for d, _ in every) == 0)
            run.say(f"{step}: {[d for d, _ in every]} checks, wrong: {[w[:5] for _, w in every]}")
            run.write(f"{step}.json", [{"checks": d, "wrong": w} for d, w in every])
        run.say(f"{step} took {time.monotonic() - start:.1f} s")
        if bad and not args.keep_going:
            break
    sys.stdout.flush()
    os._exit(1 if bad else 0)  # no teardown: every rank's memory is mapped by others


if __name__ == "__main__":
    main()
