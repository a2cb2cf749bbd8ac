"""Our CUDA kernels called directly, and checks of what they give: references, hostile data, replays, a missing rank."""

from __future__ import annotations

import importlib.util
import itertools
import random
import sys
import time
from pathlib import Path

import torch

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
        own = {"ranks": ranks, "capacity": capacity, "hidden": hidden, "dtype": DTYPES[dtype]}
        self.memory = [abi.OwnMemory(kernels, device, **own) for _ in range(ranks if self.virtual else 1)]
        slots = [m.slots for m in self.memory] if self.virtual else abi.exchange_ipc(self.memory[0], rank, gather)
        self.opened = [] if self.virtual else [s for r, s in enumerate(slots) if r != rank]
        self.base = call = abi.Call(
            dtype=DTYPES[dtype], ranks=ranks, first_rank=0 if self.virtual else rank, hidden=hidden
        )
        call.virtual_ranks, call.capacity, call.timeout_ns, call.pdl = (
            ranks if self.virtual else 0,
            capacity,
            int(timeout_s * 1e9),
            1,
        )
        call.eps = EPS
        for r, s in enumerate(slots):
            call.slots[r] = s
        for i, m in enumerate(self.memory):
            m.fill(call.rank[i])
        self.resident: dict[tuple, int] = {}

    def prepare(self, choice, op=abi.ADD_NORM):
        """A Call with this choice, its lanes limited to what is resident on every rank."""
        call = abi.Call.from_buffer_copy(self.base)
        call.op, call.cluster, call.trigger = op, choice.cluster, choice.trigger
        key = (op, choice.cluster)
        if (
            key not in self.resident
        ):  # collective: two devices of one model can differ, by the multiprocessors they had to disable
            mine = self.kernels.resident_lanes(call)
            self.resident[key] = min(self.gather(mine)) if self.gather else mine
        most = self.resident[key]
        call.max_lanes = min(choice.max_lanes or most, most)
        return call

    def fused(self, choice, xs, residuals, weight, outs, *, weight_bias=0.0, round_twice=False, pdl=True, only=None):
        """Lists of a tensor for each (virtual) rank; outs: (norm, sum). only: launch the first `only` virtual ranks."""
        call = self.prepare(choice)
        call.tokens, call.weight, call.weight_bias = xs[0].shape[0], weight.data_ptr(), weight_bias
        call.round_twice, call.pdl = int(round_twice), int(pdl)
        for i, (x, residual, (norm, total)) in enumerate(zip(xs, residuals, outs, strict=True)):
            k = call.rank[i]
            k.x, k.residual, k.norm, k.sum = x.data_ptr(), residual.data_ptr(), norm.data_ptr(), total.data_ptr()
        if only:
            call.virtual_ranks = only
        self.kernels.push(call, torch.cuda.current_stream().cuda_stream)

    def reduce(self, choice, xs, outs, pdl=True):
        call = self.prepare(choice, abi.ALL_REDUCE)
        call.tokens, call.pdl = xs[0].shape[0], int(pdl)
        for i, (x, total) in enumerate(zip(xs, outs, strict=True)):
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
    """Worst difference over |want| plus the row's mean size; NaN where exactly one is NaN. Not finite: only where."""
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
            flat[-8:] = torch.tensor([-top, 0, 1, -top + 1, -1, -1, -1, -1], device="cuda").to(
                ints
            )  # -0.0, subnormals, holes
        made = [m.view(dtype) for m in made]
    return made[:ranks], made[ranks]


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


def check_call(
    checks, ours, choice, kind, tokens, seed, *, what, weight_bias=0.0, round_twice=False, reduce=False, inplace=False
):
    """One call on fresh data against the reference, every (virtual) rank that lives in this process."""
    parts, residual = data(kind, ours.ranks, tokens, ours.hidden, ours.dtype, seed)
    weight = torch.randn(ours.hidden, device="cuda", generator=torch.Generator(device="cuda").manual_seed(seed)).to(
        ours.dtype
    )
    mine = range(ours.ranks) if ours.virtual else [ours.rank]
    total, norm = reference(parts, None if reduce else residual, weight, weight_bias, round_twice)
    outs = [outputs(tokens, ours.hidden, ours.dtype) for _ in mine]
    residuals = [residual.clone() for _ in mine]
    if inplace:
        outs = [(n, r) for (n, _), r in zip(outs, residuals, strict=True)]
    if reduce:
        ours.reduce(choice, [parts[r] for r in mine], [o[1] for o in outs])
    else:
        ours.fused(
            choice, [parts[r] for r in mine], residuals, weight, outs, weight_bias=weight_bias, round_twice=round_twice
        )
    torch.cuda.synchronize()
    for r, (got, got_sum) in zip(mine, outs, strict=True):
        checks.that(same_bits(got_sum, total), f"{what} {kind} T={tokens} {choice}: sum of rank {r}")
        if not reduce and kind != "bits":  # there sums of squares overflow fp32 but not fp64
            error = norm_error(got, norm)
            checks.that(
                error <= TOLERANCE[ours.dtype],
                f"{what} {kind} T={tokens} {choice}: norm of rank {r} off by {error:.2e}",
            )
    checks.that(not ours.reports(), f"{what}: a kernel gave up")


CHOICES = [
    abi.Choice(7),
    abi.Choice(2),
    abi.Choice(3, max_lanes=64),
    abi.Choice(4, trigger=2),
    abi.Choice(8, trigger=0),
]


def step_check(run):
    """Real ranks: dtypes, hidden sizes; tokens and choices mixed on one workspace; every bit pattern; late ranks."""
    checks, seed = Checks(), itertools.count(1)
    hiddens = {
        torch.bfloat16: (7168, 4096, 2880, 7176, 8, 16384),
        torch.float16: (7168, 5120),
        torch.float32: (4096, 2880),
    }
    for dtype, sizes in hiddens.items():
        for hidden in sizes:
            ours = run.workspace(hidden, dtype)
            for tokens in (1, 300, 2, 0, 129, 5, 700, 3, 64, 1):
                for choice in CHOICES:
                    if hidden // (4 if dtype == torch.float32 else 8) > 1024 * choice.cluster:
                        continue
                    for kind in ("normal", "bits") if tokens else ("normal",):
                        check_call(checks, ours, choice, kind, tokens, next(seed), what=f"{dtype} {hidden}")
                check_call(
                    checks, ours, choice, "integers", tokens, next(seed), what=f"{dtype} {hidden} reduce", reduce=True
                )
                check_call(
                    checks, ours, choice, "normal", tokens, next(seed), what=f"{dtype} {hidden} twice", round_twice=True
                )
                check_call(
                    checks,
                    ours,
                    choice,
                    "normal",
                    tokens,
                    next(seed),
                    what=f"{dtype} {hidden} bias",
                    weight_bias=1.0,
                    inplace=True,
                )
            ours.free(run.meet)
    replays(run, checks)
    missing(run, checks)
    return checks


def replays(run, checks):
    """A graph of calls of alternating sizes whose data change on every replay; at random a rank comes late."""
    hidden, device, rounds = 7168, "cuda", run.args.replays
    ours = run.workspace(hidden, torch.bfloat16)
    plan = [
        (1, abi.Choice(7)),
        (300, abi.Choice(2)),
        (3, abi.Choice(7)),
        (64, abi.Choice(2)),
        (2, abi.Choice(4)),
        (160, abi.Choice(2, max_lanes=64)),
    ]
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
    """Rank 1 stays away: rank 0's kernel ends at its bound and names it, later calls leave at once, the GPU works."""
    ours = run.workspace(7168, torch.bfloat16, timeout_s=0.05)
    for choice in (abi.Choice(7), abi.Choice(2)):
        check_call(checks, ours, choice, "normal", 300, 5, what="before")
    if run.rank == 0:
        for tokens in (1, 300):
            parts, residual = data("normal", run.ranks, tokens, 7168, torch.bfloat16, 1)
            weight, outs = torch.ones(7168, dtype=torch.bfloat16, device="cuda"), outputs(tokens, 7168, torch.bfloat16)
            start = time.monotonic()
            ours.fused(abi.Choice(2), [parts[0]], [residual], weight, [outs])
            torch.cuda.synchronize()
            took = time.monotonic() - start
            checks.that(took < (2.0 if tokens == 1 else 0.04), f"missing: {tokens} tokens took {took:.3f} s")
        reports = ours.reports()
        checks.that(
            len(reports) == 1 and reports[0].peer == 1 and reports[0].rank == 0 and reports[0].op == 2,
            f"missing: {len(reports)} reports",
        )
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
                            check_call(
                                checks, ours, choice, "bits", tokens, next(seed), what=f"virtual {ranks} {dtype}"
                            )
                        check_call(checks, ours, choice, "normal", tokens, next(seed), what=f"virtual {ranks} {dtype}")
                    check_call(
                        checks,
                        ours,
                        choice,
                        "integers",
                        tokens,
                        next(seed),
                        what=f"virtual {ranks} reduce",
                        reduce=True,
                    )
                ours.free()
            ours = Ours(
                run.kernels, ranks=ranks, rank=0, hidden=2880, dtype=torch.bfloat16, capacity=64, timeout_s=0.02
            )
            parts, residual = data("normal", ranks, 4, 2880, torch.bfloat16, 3)
            outs = [outputs(4, 2880, torch.bfloat16) for _ in range(ranks)]
            weight = torch.ones(2880, dtype=torch.bfloat16, device="cuda")
            ours.fused(abi.Choice(4), parts, [residual] * ranks, weight, outs, only=ranks - 1)
            torch.cuda.synchronize()
            got = [(r.rank, r.peer) for r in ours.reports()]
            checks.that(got == [(r, ranks - 1) for r in range(ranks - 1)], f"virtual {ranks}: reports {got}")
            ours.free()
    return checks
