"""Checks and times the CUDA kernels on real GPUs, one process a GPU, beside other systems' kernels in the same process.

  torchrun --nproc-per-node 2 benchmarks/fused_cuda.py --lib LIB.so --steps check,virtual,tune,time --out DIR [--peers DIR]

Steps: `check` real ranks against an fp64 reference and exact residual bits; `virtual` the same with 3..16 ranks on one device;
`tune` our own choices at each size; `time` ours beside the peers, rounds interleaved (needs measure_peers.py and its kit).
Nothing is timed before it was found right. NVLink multicast stays off.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
os.environ.update(NO_MULTICAST)

import torch  # noqa: E402  (after the environment)
import torch.distributed as dist  # noqa: E402

HERE = Path(__file__).resolve().parent
EPS = 1e-6
DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


def load_file(name: str, path: Path):
    """A module from its file, so that the package around it need not be importable."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


abi = load_file("custom_abi", HERE.parent / "workbench" / "backends" / "custom_abi.py")


# ---- our kernels, called directly


class Ours:
    """One workspace. Real ranks: one process a rank, gather exchanges handles. Virtual ranks: gather is None."""

    def __init__(self, kernels, *, ranks, rank, hidden, dtype, capacity=1024, gather=None, timeout_s=5.0):
        self.kernels, self.ranks, self.rank, self.hidden, self.dtype = kernels, ranks, rank, hidden, dtype
        self.gather, self.virtual, device = gather, gather is None, torch.cuda.current_device()
        own = dict(ranks=ranks, capacity=capacity, hidden=hidden, dtype=DTYPES[dtype])
        self.memory = [abi.OwnMemory(kernels, device, **own) for _ in range(ranks if self.virtual else 1)]
        slots = [m.slots for m in self.memory] if self.virtual else abi.exchange_ipc(self.memory[0], rank, gather)
        self.opened = [] if self.virtual else [s for r, s in enumerate(slots) if r != rank]
        self.base = call = abi.Call(dtype=DTYPES[dtype], ranks=ranks, first_rank=0 if self.virtual else rank, hidden=hidden)
        call.virtual_ranks, call.capacity, call.timeout_ns, call.pdl = ranks if self.virtual else 0, capacity, int(timeout_s * 1e9), 1
        call.eps = EPS
        for r, s in enumerate(slots):
            call.slots[r] = s
        for i, m in enumerate(self.memory):
            m.fill(call.rank[i])
        self.resident: dict[tuple, int] = {}

    def prepare(self, choice, op=abi.ADD_NORM):
        """A Call with this choice, its lanes limited to what is resident on every rank."""
        call = abi.Call.from_buffer_copy(self.base)
        call.op, call.algorithm, call.cluster, call.senders = op, choice.algorithm, choice.cluster, choice.senders
        call.trigger, call.poll = choice.trigger, choice.poll
        key = (op, choice.algorithm, choice.cluster, choice.poll)
        if key not in self.resident:  # collective: two devices of one model can differ, by the multiprocessors they had to disable
            mine = self.kernels.resident_lanes(call)
            self.resident[key] = min(self.gather(mine)) if self.gather else mine
        most = self.resident[key]
        call.max_lanes = min(choice.max_lanes or most, most)
        return call

    def fused(self, choice, xs, residuals, weight, outs, *, weight_bias=0.0, round_twice=False, pdl=True, only=None):
        """Lists of one tensor a (virtual) rank; outs: (norm, sum) pairs. only: launch the first `only` virtual ranks."""
        call = self.prepare(choice)
        call.tokens, call.weight, call.weight_bias = xs[0].shape[0], weight.data_ptr(), weight_bias
        call.round_twice, call.pdl = int(round_twice), int(pdl)
        for i, (x, residual, (norm, total)) in enumerate(zip(xs, residuals, outs)):
            k = call.rank[i]
            k.x, k.residual, k.norm, k.sum = x.data_ptr(), residual.data_ptr(), norm.data_ptr(), total.data_ptr()
        if only:
            call.virtual_ranks = only
        self.kernels.push(call, torch.cuda.current_stream().cuda_stream)

    def reduce(self, choice, xs, outs, pdl=True):
        call = self.prepare(choice, abi.ALL_REDUCE)
        call.tokens, call.pdl = xs[0].shape[0], int(pdl)
        for i, (x, total) in enumerate(zip(xs, outs)):
            call.rank[i].x, call.rank[i].sum = x.data_ptr(), total.data_ptr()
        self.kernels.push(call, torch.cuda.current_stream().cuda_stream)

    def reports(self):
        return [m.report for m in self.memory if m.report.valid]

    def free(self, meet=lambda: None):
        torch.cuda.synchronize()
        meet()
        for s in self.opened:
            self.kernels.close(torch.cuda.current_device(), s)
        meet()
        for m in self.memory:
            m.free()


# ---- reference


def reference(parts, residual, weight, weight_bias=0.0, round_twice=False):
    """(sum + residual rounded once, exactly as fp32 in rank order gives it; norm in fp64 from that sum)."""
    total = parts[0].float()
    for p in parts[1:]:
        total = total + p.float()
    if round_twice:
        total = total.to(parts[0].dtype).float()
    if residual is None:
        return total.to(parts[0].dtype), None
    total = (total + residual.float()).to(parts[0].dtype)
    wide = total.double()
    norm = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * (weight_bias + weight.double())
    return total, norm


def same_bits(a, b):
    """Equal bit for bit, where any NaN equals any NaN."""
    ints = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return bool(((a.view(ints) == b.view(ints)) | (a.isnan() & b.isnan())).all())


def norm_error(norm, want):
    """Worst difference over |want| plus the row's mean size; NaN where exactly one is NaN. Rows with Inf or NaN: only which."""
    got = norm.double()
    fine = want.isfinite().all(-1)
    if bool((got.isnan() != want.isnan()).any()):
        return float("nan")
    got, want = got[fine], want[fine]
    if not got.numel():
        return 0.0
    return float(((got - want).abs() / (want.abs() + 1e-3 * want.abs().mean(-1, keepdim=True) + 1e-30)).max())


# one rounding of the result (half a unit of the last place) plus fp32 arithmetic before it
TOLERANCE = {torch.bfloat16: 2**-8 * 1.01, torch.float16: 2**-11 * 1.05, torch.float32: 4e-6}


def data(kind, ranks, tokens, hidden, dtype, seed):
    """Every rank's x and the common residual, from one seed."""
    gen = torch.Generator(device="cuda").manual_seed(seed)
    shape = (tokens, hidden)
    if kind == "integers":
        made = [torch.randint(-8, 9, shape, device="cuda", generator=gen).to(dtype) for _ in range(ranks + 1)]
    elif kind == "normal":
        made = [torch.randn(shape, device="cuda", generator=gen).to(dtype) for _ in range(ranks + 1)]
    else:  # every bit pattern, and whole words of ones, which is what a slot that waits holds
        ints, bits = {2: (torch.int16, 16), 4: (torch.int32, 32)}[dtype.itemsize]
        top = 1 << (bits - 1)
        made = [torch.randint(-top, top, shape, device="cuda", generator=gen).to(ints) for _ in range(ranks + 1)]
        for m in made:
            flat = m.view(-1)
            flat[: min(64, flat.numel())] = -1
            flat[-8:] = torch.tensor([-top, 0, 1, -top + 1, -1, -1, -1, -1], device="cuda").to(ints)  # -0.0, subnormals, holes
        made = [m.view(dtype) for m in made]
    return made[:ranks], made[ranks]


def stream(cluster, senders, **more):
    return abi.Choice(cluster, abi.STREAM, senders, **more)


class Checks:
    """Counts and names what went wrong; a step that checked nothing fails."""

    def __init__(self):
        self.done, self.wrong = 0, []

    def that(self, fine, what):
        self.done += 1
        if not fine:
            self.wrong.append(what)
            print("WRONG", what, flush=True)


def outputs(tokens, hidden, dtype):
    """Poisoned (norm, sum)."""
    return tuple(torch.full((tokens, hidden), 123.0, dtype=dtype, device="cuda") for _ in range(2))


def check_call(checks, ours, choice, kind, tokens, seed, *, what, weight_bias=0.0, round_twice=False, reduce=False, inplace=False):
    """One call on fresh data against the reference, every (virtual) rank that lives in this process."""
    parts, residual = data(kind, ours.ranks, tokens, ours.hidden, ours.dtype, seed)
    weight = torch.randn(ours.hidden, device="cuda", generator=torch.Generator(device="cuda").manual_seed(seed)).to(ours.dtype)
    mine = range(ours.ranks) if ours.virtual else [ours.rank]
    total, norm = reference(parts, None if reduce else residual, weight, weight_bias, round_twice)
    outs = [outputs(tokens, ours.hidden, ours.dtype) for _ in mine]
    residuals = [residual.clone() for _ in mine]
    if inplace:
        outs = [(n, r) for (n, _), r in zip(outs, residuals)]
    if reduce:
        ours.reduce(choice, [parts[r] for r in mine], [o[1] for o in outs])
    else:
        ours.fused(choice, [parts[r] for r in mine], residuals, weight, outs, weight_bias=weight_bias, round_twice=round_twice)
    torch.cuda.synchronize()
    for r, (got, got_sum) in zip(mine, outs):
        checks.that(same_bits(got_sum, total), f"{what} {kind} T={tokens} {choice}: sum of rank {r}")
        if not reduce and kind != "bits":  # there sums of squares overflow fp32 but not fp64
            error = norm_error(got, norm)
            checks.that(error <= TOLERANCE[ours.dtype], f"{what} {kind} T={tokens} {choice}: norm of rank {r} off by {error:.2e}")
    checks.that(not ours.reports(), f"{what}: a kernel gave up")


CHOICES = [abi.Choice(7), abi.Choice(1, poll=1), stream(1, 16), abi.Choice(2, max_lanes=64), abi.Choice(4, poll=1, trigger=2), abi.Choice(8, trigger=0), stream(2, 8)]


def step_check(run):
    """Real ranks: dtypes, hidden sizes, tokens, choices interleaved on one workspace; special values; replays with delays."""
    checks, seed = Checks(), itertools.count(1)
    hiddens = {torch.bfloat16: (7168, 4096, 2880, 7176, 8, 16384), torch.float16: (7168, 5120), torch.float32: (4096, 2880)}
    for dtype, sizes in hiddens.items():
        for hidden in sizes:
            ours = run.workspace(hidden, dtype)
            for tokens in (1, 300, 2, 0, 129, 5, 700, 3, 64, 1):
                for choice in CHOICES:
                    if hidden // (4 if dtype == torch.float32 else 8) > 1024 * choice.cluster:
                        continue
                    for kind in ("normal", "bits") if tokens else ("normal",):
                        check_call(checks, ours, choice, kind, tokens, next(seed), what=f"{dtype} {hidden}")
                check_call(checks, ours, choice, "integers", tokens, next(seed), what=f"{dtype} {hidden} reduce", reduce=True)
                check_call(checks, ours, choice, "normal", tokens, next(seed), what=f"{dtype} {hidden} twice", round_twice=True)
                check_call(checks, ours, choice, "normal", tokens, next(seed), what=f"{dtype} {hidden} bias", weight_bias=1.0, inplace=True)
            ours.free(run.meet)
    replays(run, checks)
    missing(run, checks)
    return checks


def replays(run, checks, rounds=10000):
    """One graph of calls of alternating sizes whose data change on every replay; one rank, drawn at random, comes late."""
    hidden, device = 7168, "cuda"
    ours = run.workspace(hidden, torch.bfloat16)
    plan = [(1, abi.Choice(7)), (300, stream(1, 16)), (3, abi.Choice(7)), (64, abi.Choice(1)), (2, abi.Choice(4)), (160, stream(2, 8))]
    counter = torch.zeros((), dtype=torch.int64, device=device)
    bad = torch.zeros((), dtype=torch.int64, device=device)
    weight = torch.ones(hidden, device=device, dtype=torch.bfloat16)
    cases = []
    for tokens, choice in plan:
        index = torch.arange(tokens * hidden, device=device).view(tokens, hidden)
        x, residual = (torch.empty(tokens, hidden, dtype=torch.bfloat16, device=device) for _ in range(2))
        cases.append((index, x, residual, choice, outputs(tokens, hidden, torch.bfloat16)))

    def value(index, r):
        return ((index + counter * (2 * r + 3)) % 17 - 8).to(torch.bfloat16)

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
    dice = random.Random(7 + run.rank)
    for i in range(rounds):
        if dice.random() < 0.02:
            run.kernels.delay(dice.randrange(1000, 60000), torch.cuda.current_stream().cuda_stream)
        graph.replay()
        if i % 500 == 499:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    checks.that(int(counter) == rounds + 1, f"replays: {int(counter)} rounds")
    checks.that(int(bad) == 0, f"replays: {int(bad)} wrong elements in {rounds} replays")
    checks.that(not ours.reports(), "replays: a kernel gave up")
    ours.free(run.meet)


def missing(run, checks):
    """Rank 1 stays away: rank 0's kernel ends in bounded time, names it, later calls leave at once, the GPU goes on working."""
    ours = run.workspace(7168, torch.bfloat16, timeout_s=0.05)
    for choice in (abi.Choice(7), stream(1, 16)):
        check_call(checks, ours, choice, "normal", 300, 5, what="before")
    if run.rank == 0:
        for tokens in (1, 300):
            parts, residual = data("normal", run.ranks, tokens, 7168, torch.bfloat16, 1)
            weight, outs = torch.ones(7168, dtype=torch.bfloat16, device="cuda"), outputs(tokens, 7168, torch.bfloat16)
            start = time.monotonic()
            ours.fused(stream(1, 16), [parts[0]], [residual], weight, [outs])
            torch.cuda.synchronize()
            took = time.monotonic() - start
            checks.that(took < (2.0 if tokens == 1 else 0.04), f"missing: {tokens} tokens took {took:.3f} s")
        reports = ours.reports()
        checks.that(len(reports) == 1 and reports[0].peer == 1 and reports[0].rank == 0 and reports[0].op == 2, f"missing: {len(reports)} reports")
        checks.that(bool(reports) and reports[0].expected == reports[0].seen + 1, "missing: epochs")
        a = torch.ones(512, 512, device="cuda")
        checks.that(float((a @ a)[0, 0]) == 512.0, "missing: GPU unusable afterwards")
    run.meet()
    ours.free(run.meet)


def step_virtual(run):
    """3..16 ranks of one process on one device, each rank's bits equal; a rank that never comes is named."""
    checks, seed = Checks(), itertools.count(1000)
    if run.rank == 0:
        for ranks in (2, 3, 4, 6, 8, 16):
            for dtype, hidden in ((torch.bfloat16, 7168), (torch.float16, 2880), (torch.float32, 4096)):
                ours = Ours(run.kernels, ranks=ranks, rank=0, hidden=hidden, dtype=dtype, capacity=64)
                for tokens in (1, 9, 2, 33, 5, 0, 16, 3):
                    for choice in (abi.Choice(7), abi.Choice(2), abi.Choice(4)):
                        if tokens:
                            check_call(checks, ours, choice, "bits", tokens, next(seed), what=f"virtual {ranks} {dtype}")
                        check_call(checks, ours, choice, "normal", tokens, next(seed), what=f"virtual {ranks} {dtype}")
                    check_call(checks, ours, choice, "integers", tokens, next(seed), what=f"virtual {ranks} reduce", reduce=True)
                ours.free()
            ours = Ours(run.kernels, ranks=ranks, rank=0, hidden=2880, dtype=torch.bfloat16, capacity=64, timeout_s=0.02)
            parts, residual = data("normal", ranks, 4, 2880, torch.bfloat16, 3)
            outs = [outputs(4, 2880, torch.bfloat16) for _ in range(ranks)]
            weight = torch.ones(2880, dtype=torch.bfloat16, device="cuda")
            ours.fused(abi.Choice(4), parts, [residual] * ranks, weight, outs, only=ranks - 1)
            torch.cuda.synchronize()
            got = [(r.rank, r.peer) for r in ours.reports()]
            checks.that(got == [(r, ranks - 1) for r in range(ranks - 1)], f"virtual {ranks}: reports {got}")
            ours.free()
    return checks


# ---- timing


def short(c):
    return ("s" if c.algorithm else "p") + f"{c.cluster}" + f"x{c.senders}" * bool(c.senders) + "f" * c.poll + f" t{c.trigger}" + f" l{c.max_lanes}" * bool(c.max_lanes)


def show_stamps(run, ours, names, cases):
    """Clock ticks between the steps of lane 0, means over the last calls of a graph of twenty; and ns from end to next start."""
    for name in names:
        graph = run.bench.capture(cases[name], 20)[0]
        for _ in range(3):
            graph.replay()
        run.meet()
        place = ours.memory[0].records + 200 * 64
        storage = torch._C._construct_storage_from_data_pointer(place, torch.device("cuda", run.rank), 16 * 64)
        words = torch.empty(0, dtype=torch.int32, device="cuda").set_(storage, 0, (256,)).clone().view(16, 16).cpu().to(torch.int64)
        words = words[torch.argsort(words[:, 10])]  # by start
        steps = (words[:, 1:8] - words[:, 0:7]).float()
        ends = (words[:, 9] - words[:, 7]).float()
        gaps = (words[1:, 10] - words[:-1, 11]).float()
        run.say(name, "entry>", [round(float(v)) for v in steps.median(0).values], "norm+end", round(float(ends.median())), "gap ns", gaps.tolist()[-6:],
                "run ns", (words[:, 11] - words[:, 10]).tolist()[-6:])


def step_diag(run):
    """Builds of the kernel with one stage left out, side by side: where the time goes. Their results are wrong on purpose."""
    run.load_peers(7168, run.args.parts)
    libs = {p.stem[5:]: abi.Kernels(p) for p in sorted(Path(run.args.diag).glob("diag_*.so"))}
    table = {}
    for tokens in run.args.diag_tokens:
        cases, all_ours = {}, []
        x, residual, weight, norm, total = run.tensors(tokens, 7168)
        if tokens <= 128:
            choices = [abi.Choice(7, trigger=0), abi.Choice(7), abi.Choice(7, poll=1), abi.Choice(1, poll=1)]
        else:
            choices = [stream(1, 16, trigger=2), stream(1, 24, trigger=2), abi.Choice(4, poll=1)]
        for name, lib in libs.items():
            if tokens > 128 and name == "noex":
                continue
            ours = Ours(lib, ranks=run.ranks, rank=run.rank, hidden=7168, dtype=torch.bfloat16, gather=run.gather, capacity=tokens)
            all_ours.append(ours)
            for choice in choices:
                cases[f"{name} {short(choice)}"] = lambda ours=ours, choice=choice: ours.fused(choice, [x], [residual], weight, [(norm, total)])
            if name == "stamp":
                stamped = ours
        for c in (1, 4, 7, 14):
            cases[f"sum c{c}"] = lambda ours=all_ours[0], c=c: ours.reduce(abi.Choice(c), [x], [total])
        cases.update(run.peer_cases(tokens, x, residual, weight, norm, total))
        result = run.bench.compare(cases)
        table[str(tokens)] = result
        run.say(f"diag T{tokens}: " + "  ".join(f"{k}={result[k]['us']:.2f}" for k in sorted(result, key=lambda k: result[k]["us"])))
        if "stamp" in libs and tokens <= 128:
            show_stamps(run, stamped, [c for c in cases if c.startswith("stamp")], cases)
        for ours in all_ours:
            ours.free(run.meet)
    run.write("diag.json", table)
    return table


def step_tune(run):
    """us of every choice at each size, and the bare peer write and the two nearest peers beside them."""
    table = {}
    for hidden in run.args.hidden:
        run.load_peers(hidden, run.args.parts)
        ours = run.workspace(hidden, torch.bfloat16, capacity=max(run.args.tokens))
        for tokens in run.args.tokens:
            cases = {}
            x, residual, weight, norm, total = run.tensors(tokens, hidden)
            for choice in run.tune_choices(tokens, hidden):
                name = short(choice)
                cases[name] = lambda choice=choice: ours.fused(choice, [x], [residual], weight, [(norm, total)])
            cases["sum c7"] = lambda: ours.reduce(abi.Choice(7), [x], [total])
            cases.update(run.peer_cases(tokens, x, residual, weight, norm, total, few=True))
            result = run.bench.compare(cases)
            table[f"{hidden}/{tokens}"] = result
            order = sorted(result, key=lambda k: result[k]["us"])
            run.say(f"h{hidden} T{tokens}: " + "  ".join(f"{k}={result[k]['us']:.2f}" for k in order))
            run.write("tune.json", table)
        ours.free(run.meet)
    return table


class Run:
    def __init__(self, args):
        self.args, self.rank, self.ranks = args, dist.get_rank(), dist.get_world_size()
        self.gloo = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=90))
        self.kernels = abi.Kernels(args.lib)
        self.out, self.ops, self.loaded = Path(args.out), {}, set()
        self.out.mkdir(parents=True, exist_ok=True)
        self.bench = None

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
        return Ours(self.kernels, ranks=self.ranks, rank=self.rank, hidden=hidden, dtype=dtype, gather=self.gather, **more)

    def tensors(self, tokens, hidden):
        gen = torch.Generator(device="cuda").manual_seed(self.rank + 1)
        x, residual = (torch.randn(tokens, hidden, device="cuda", generator=gen).to(torch.bfloat16) for _ in range(2))
        weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
        return x, residual, weight, *outputs(tokens, hidden, torch.bfloat16)

    def load_peers(self, hidden, parts):
        """Peers hold global objects, so one hidden size a process for those compiled per hidden size."""
        import measure_peers as mp

        if self.bench is None:
            self.bench = mp.Bench(self.gloo, self.args.reps, self.args.iters)
        if parts and hidden not in self.loaded:
            self.loaded.add(hidden)
            self.ops = mp.load_peers(parts, self.bench, hidden=hidden, max_tokens=max(self.args.tokens), peers=self.args.peers)

    def peer_cases(self, tokens, x, residual, weight, norm, total, few=False):
        names = ("p2p_write", "sm_write", "norm", "sgl_fused_1", "sgl_fused_2", "sgl_ar", "sgl+norm", "symm2+norm", "fi_one", "vllm_reg+norm", "nccl+norm")
        cases = {}
        for name in names:
            op = self.ops.get(name)
            if op is None or not op.fits(tokens):
                continue
            given = x
            if op.input is not None:
                given = op.input(tokens)
                given.copy_(x)
            if op.kind in ("sum", "copy"):
                cases[name] = op.on(given, total)
            else:
                cases[name] = op.on(given, residual if "+norm" in name or op.kind == "norm" else residual, weight, EPS, (norm, total))
        return cases

    def tune_choices(self, tokens, hidden):
        """Choices worth timing at this size."""
        vectors = hidden // 8
        for cluster in (1, 2, 4, 7, 8, 14):
            if cluster == (8 if vectors % 7 == 0 else 7) or vectors < 32 * cluster or (cluster == 14 and (vectors % 7 or tokens > 8)):
                continue
            if tokens >= 16 or cluster >= 4:
                for poll in (0, 1):
                    yield abi.Choice(cluster, poll=poll)
        if tokens >= 256:
            for trigger in (1, 2, 3):
                for senders in (4, 8, 12, 16, 24, 32):
                    if trigger == 2 or senders == 16:
                        yield stream(1, senders, trigger=trigger)
            yield stream(2, 16, trigger=2)
            yield stream(2, 24, trigger=2)
            yield stream(4, 16, trigger=2)
            yield abi.Choice(4, poll=1, trigger=3)
            yield abi.Choice(2, poll=1, trigger=3)
            yield abi.Choice(1, poll=1, trigger=3)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--lib", required=True)
    p.add_argument("--steps", default="check")
    p.add_argument("--out", default="out")
    p.add_argument("--peers")
    p.add_argument("--parts", default="base,sglang")
    p.add_argument("--hidden", type=lambda s: [int(v) for v in s.split(",")], default=[7168])
    p.add_argument("--tokens", type=lambda s: [int(v) for v in s.split(",")], default=[1 << i for i in range(13)])
    p.add_argument("--reps", type=int, default=20)
    p.add_argument("--iters", type=int, default=30)
    p.add_argument("--diag", default=".", help="folder of diag_*.so")
    p.add_argument("--diag-tokens", type=lambda s: [int(v) for v in s.split(",")], default=[1, 128, 4096])
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
    for step in args.steps.split(","):
        start = time.monotonic()
        result = {"check": step_check, "virtual": step_virtual, "tune": step_tune, "diag": step_diag}[step](run)
        if isinstance(result, Checks):
            every = run.gather((result.done, result.wrong))
            bad += sum(len(w) for _, w in every)
            run.say(f"{step}: {[d for d, _ in every]} checks, wrong: {[w[:5] for _, w in every]}")
            run.write(f"{step}.json", [{"checks": d, "wrong": w} for d, w in every])
        run.say(f"{step} took {time.monotonic() - start:.1f} s")
        if bad and not args.keep_going:
            break
    sys.stdout.flush()
    os._exit(1 if bad else 0)


if __name__ == "__main__":
    main()
