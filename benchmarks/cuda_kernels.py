"""Our CUDA kernels called directly, and what their results are compared with: references, hostile data."""

from __future__ import annotations

import importlib.util
import os
import sys
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


BACKENDS = HERE.parent / "workbench" / "backends"
abi = load_file("custom_abi", BACKENDS / "custom_abi.py")
descriptors = load_file("descriptors", BACKENDS / "descriptors.py")


# ---- our kernels, called directly


class Ours:
    """One workspace. Real ranks: one process a rank, gather exchanges handles. Virtual ranks: gather is None.

    capacity: tokens, by either algorithm. share: how real ranks map each other's memory.
    """

    def __init__(self, kernels, *, ranks, rank, hidden, dtype, capacity=1024, gather=None, timeout_s=5.0, share=abi.FD):
        self.kernels, self.ranks, self.rank, self.hidden, self.dtype = kernels, ranks, rank, hidden, dtype
        self.gather, self.virtual, device = gather, gather is None, torch.cuda.current_device()
        rows = max(capacity, abi.two_shot_rows(capacity, ranks))
        own = {"ranks": ranks, "rows": rows, "hidden": hidden, "dtype": DTYPES[dtype], "share": share}
        self.memory = [abi.OwnMemory(kernels, device, **own) for _ in range(ranks if self.virtual else 1)]
        slots = [m.slots for m in self.memory] if self.virtual else self.exchange()
        self.opened = [] if self.virtual else [s for r, s in enumerate(slots) if r != rank]
        self.base = call = abi.Call(
            dtype=DTYPES[dtype], ranks=ranks, first_rank=0 if self.virtual else rank, hidden=hidden
        )
        call.virtual_ranks, call.plane_rows, call.timeout_ns, call.pdl = (
            ranks if self.virtual else 0,
            rows,
            int(timeout_s * 1e9),
            1,
        )
        call.eps = EPS
        for r, s in enumerate(slots):
            call.slots[r] = s
        for i, m in enumerate(self.memory):
            m.fill(call.rank[i])
        self.resident: dict[tuple, int] = {}

    def exchange(self):
        """Every rank's slots as this process sees them. Collective."""
        own, slots = self.memory[0], []
        server = descriptors.DescriptorServer(own.handle.fd) if own.share == abi.FD else None
        told = self.gather((bytes(own.handle.bytes).hex(), server.address if server else ""))
        for r, (handle, address) in enumerate(told):
            if r == self.rank:
                slots.append(own.slots)
                continue
            fd = descriptors.fetch_descriptor(address, 20.0) if server else -1
            slots.append(own.open_peer(bytes.fromhex(handle), fd))
            if server:
                os.close(fd)
        self.gather("mapped")
        if server:
            server.close()
        own.close_descriptor()
        return slots

    def prepare(self, choice, op=abi.ADD_NORM):
        """A Call with this choice, its lanes limited to what is resident on every rank."""
        call = abi.Call.from_buffer_copy(self.base)
        call.op, call.algorithm, call.cluster, call.trigger = op, choice.algorithm, choice.cluster, choice.trigger
        key = (op, choice.algorithm, choice.cluster)
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
            self.memory[0].close_peer(s)
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
            if len(self.wrong) <= 10:
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
