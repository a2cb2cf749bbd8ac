"""Our fused kernel when one of two ranks comes late, for several builds of it at once, on one GPU and in one process.

  python benchmarks/late_rank.py --libs base=FILE.so,new=FILE.so,few=FILE.so:cluster=2 --json FILE [--hidden 7168,4096]

Two ranks of this process play on two streams of one device, each with slots of its own: what a late rank does alone is
what it does on two GPUs; what crosses a link is not. Settings, a graph of --calls calls each:

  together  both graphs at once: microseconds a call, slower rank
  late      rank 1 waits before each call: from its arrival to its own end, less the same without a call between
  other     the same calls: from that arrival to the end of rank 0, which was there before
  products  each call between two matrix products: microseconds of all three, slower rank

Builds take turns round by round, after each was right on whole numbers in each setting; give one twice to see the
noise. Behind a file: cluster=N blocks a row, trigger=N, pdl=0, most=N tokens for which this build is timed, bounded=0
for a build whose waits have no end: it runs only where every build before it was right.
Above 32 tokens a device that two ranks share holds fewer lanes than one with a rank of its own. Every wait of a kernel
ends after --timeout-s, and the program after --limit-s.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # else both streams may share a queue

import torch
from cuda_kernels import EPS, TOLERANCE, abi, norm_error, outputs, reference, same_bits

DTYPE = torch.bfloat16
SETS = 4
"""Inputs and outputs that a graph's calls take in turns."""
INNER = 512
"""Of the products: short ones, so that the call between them is not lost in their noise."""


@dataclass(frozen=True, slots=True)
class Way:
    """One build, and how its calls are laid out where `choose` is not followed."""

    name: str
    kernels: abi.Kernels
    cluster: int = 0
    trigger: int = abi.TRIGGER_AFTER_PUSH
    pdl: int = 1
    most: int = 1 << 30
    bounded: int = 1


def ways_of(text: str) -> list[Way]:
    """The ways that --libs names."""
    loaded: dict[str, abi.Kernels] = {}
    found = []
    for part in text.split(","):
        name, _, rest = part.partition("=")
        path, *options = rest.split(":")
        if path not in loaded:
            loaded[path] = abi.Kernels(Path(path).resolve())
        numbers = {key: int(value) for key, value in (option.split("=") for option in options)}
        found.append(Way(name, loaded[path], **numbers))
    return found


class Clock:
    """late_rank.cu: delays and stamps on a stream."""

    def __init__(self, path: str | None) -> None:
        if path is None:
            path = f"{tempfile.mkdtemp()}/late_rank.so"
            nvcc = next((p for p in ("/usr/local/cuda/bin/nvcc",) if os.path.exists(p)), "nvcc")
            source = str(Path(__file__).with_suffix(".cu"))
            line = [nvcc, "-O3", "-shared", "-Xcompiler", "-fPIC", "-arch=native", source, "-o", path]
            subprocess.run(line, check=True, timeout=120)
        self.lib = ctypes.CDLL(str(Path(path).resolve()))
        self.lib.late_delay.argtypes = [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p]
        self.lib.late_stamp.argtypes = [ctypes.c_void_p, ctypes.c_void_p]

    def delay(self, cycles: int, ended: torch.Tensor, stream: torch.cuda.Stream) -> None:
        code = self.lib.late_delay(cycles, ended.data_ptr(), stream.cuda_stream)
        assert code == 0, f"CUDA error {code}"

    def stamp(self, at: torch.Tensor, stream: torch.cuda.Stream) -> None:
        code = self.lib.late_stamp(at.data_ptr(), stream.cuda_stream)
        assert code == 0, f"CUDA error {code}"


@dataclass(frozen=True, slots=True)
class Bytes:
    """Memory of the device that torch did not allocate, as torch.as_tensor takes it."""

    address: int
    size: int

    @property
    def __cuda_array_interface__(self) -> dict:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 2}


class Pair:
    """Both ranks' memory for one way and one hidden size."""

    def __init__(self, way: Way, hidden: int, rows: int, timeout_s: float) -> None:
        own = {"ranks": 2, "rows": rows, "hidden": hidden, "dtype": abi.BF16, "share": abi.IPC}
        self.way, self.hidden = way, hidden
        self.memory = [abi.OwnMemory(way.kernels, 0, **own) for _ in range(2)]
        self.base = abi.Call(op=abi.ADD_NORM, dtype=abi.BF16, ranks=2, hidden=hidden, plane_rows=rows, eps=EPS)
        self.base.timeout_ns, self.base.pdl, self.base.trigger = int(timeout_s * 1e9), way.pdl, way.trigger
        for rank, memory in enumerate(self.memory):
            self.base.slots[rank] = memory.slots
        self.slots = [torch.as_tensor(Bytes(m.slots, m.size_bytes), device="cuda") for m in self.memory]
        self.control = [torch.as_tensor(Bytes(m.control, 64), device="cuda").view(torch.int32) for m in self.memory]

    def call(self, rank: int, tokens: int, *, share: int, x, residual, weight, outs) -> abi.Call:
        """One rank's call; share: how many calls must find room on the device at one time."""
        call = abi.Call.from_buffer_copy(self.base)
        choice = abi.choose(tokens, self.hidden, DTYPE.itemsize)
        call.first_rank, call.tokens, call.cluster = rank, tokens, self.way.cluster or choice.cluster
        room = self.way.kernels.resident_lanes(call) // share
        call.max_lanes = min(choice.max_lanes or room, room)
        self.memory[rank].fill(call.rank[0])
        own = call.rank[0]
        own.x, own.residual, own.norm, own.sum = (t.data_ptr() for t in (x, residual, *outs))
        call.weight = weight.data_ptr()
        return call

    def leave_at_once(self, yes: bool) -> None:
        """Whether calls leave without waiting for the other rank, as they do after a wait that ended at its bound."""
        torch.cuda.synchronize()
        for control in self.control:
            control[1] = int(yes)
        torch.cuda.synchronize()

    def reset(self) -> None:
        """As new, after a call that gave up."""
        torch.cuda.synchronize()
        for memory, slots, control in zip(self.memory, self.slots, self.control, strict=True):
            slots.fill_(255)
            control.zero_()
            memory.report.valid = 0
        torch.cuda.synchronize()

    def gave_up(self) -> bool:
        return any(memory.report.valid for memory in self.memory)

    def free(self) -> None:
        for memory in self.memory:
            memory.free()


class Bench:
    """The tensors of one size, and the graphs of one way over them."""

    def __init__(self, args, clock: Clock, hidden: int, tokens: int) -> None:
        self.args, self.clock, self.hidden, self.tokens = args, clock, hidden, tokens
        self.streams = args.streams
        shape = (tokens, hidden)
        self.xs = [[torch.zeros(shape, dtype=DTYPE, device="cuda") for _ in range(SETS)] for _ in range(2)]
        self.residuals = [torch.zeros(shape, dtype=DTYPE, device="cuda") for _ in range(SETS)]
        self.outs = [[outputs(tokens, hidden, DTYPE) for _ in range(SETS)] for _ in range(2)]
        self.weight = torch.randn(hidden, device="cuda").to(DTYPE)
        self.given = [torch.randint(-1, 2, (tokens, INNER), device="cuda").to(DTYPE) for _ in range(2)]
        self.first = [torch.randint(-1, 2, (INNER, hidden), device="cuda").to(DTYPE) for _ in range(2)]
        self.second = [(torch.randn(hidden, INNER, device="cuda") / 64).to(DTYPE) for _ in range(2)]
        self.result = [torch.empty(tokens, INNER, dtype=DTYPE, device="cuda") for _ in range(2)]
        self.stamps = torch.zeros(3, args.calls, dtype=torch.int64, device="cuda")  # ends of ranks 0 and 1, arrivals
        for rank, stream in enumerate(self.streams):  # cuBLAS takes its memory now
            with torch.cuda.stream(stream):
                torch.mm(self.given[rank], self.first[rank], out=self.xs[rank][0])
                torch.mm(self.outs[rank][0][0], self.second[rank], out=self.result[rank])
        torch.cuda.synchronize()
        self.floor = self.captured(1, self.floor_body)

    def draw(self, seed: int) -> None:
        """New whole numbers everywhere, and poisoned outputs."""
        torch.manual_seed(seed)
        for tensor in (*self.xs[0], *self.xs[1], *self.residuals):
            tensor.copy_(torch.randint(-8, 9, tensor.shape, device="cuda"))
        for norm, total in (*self.outs[0], *self.outs[1]):
            norm.fill_(123.0)
            total.fill_(123.0)

    def captured(self, rank: int, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.streams[rank]):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                body()
            finally:
                graph.capture_end()
        return graph

    def pause(self, i: int) -> None:
        cycles = self.args.delay_cycles + 97 * (i % 7)
        self.clock.delay(cycles, self.stamps[2, i], self.streams[1])

    def floor_body(self) -> None:
        for i in range(self.args.calls):
            self.pause(i)
            self.clock.stamp(self.stamps[1, i], self.streams[1])

    def graphs(self, pair: Pair, setting: str) -> list[torch.cuda.CUDAGraph]:
        """A graph for each rank."""
        share = 4 if setting == "together" else 2  # back to back, the next call takes its place early
        made = []
        for rank, stream in enumerate(self.streams):
            calls = [
                pair.call(
                    rank,
                    self.tokens,
                    share=share,
                    x=self.xs[rank][s],
                    residual=self.residuals[s],
                    weight=self.weight,
                    outs=self.outs[rank][s],
                )
                for s in range(SETS)
            ]

            def body(rank=rank, stream=stream, calls=calls) -> None:
                for i in range(self.args.calls):
                    s = i % SETS
                    if setting == "late" and rank == 1:
                        self.pause(i)
                    if setting == "products":
                        torch.mm(self.given[rank], self.first[rank], out=self.xs[rank][s])
                    pair.way.kernels.push(calls[s], stream.cuda_stream)
                    if setting == "products":
                        torch.mm(self.outs[rank][s][0], self.second[rank], out=self.result[rank])
                    if setting == "late":
                        self.clock.stamp(self.stamps[rank, i], stream)

            made.append(self.captured(rank, body))
        return made

    def replay(self, graphs: list[torch.cuda.CUDAGraph]) -> list[tuple]:
        """Both graphs once, rank 0's first; events around each."""
        events = []
        for stream, graph in zip(self.streams, graphs, strict=True):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(stream):
                before.record()
                graph.replay()
                after.record()
            events.append((before, after))
        return events

    def wrong(self, pair: Pair, graphs: list[torch.cuda.CUDAGraph]) -> str:
        """What is wrong with the results, or ""."""
        pair.leave_at_once(True)  # a graph's first launch, and a kernel's, may wait for the device
        self.replay(graphs)
        pair.leave_at_once(False)
        for seed in range(3):
            self.draw(seed)
            torch.cuda.synchronize()
            self.replay(graphs)
            torch.cuda.synchronize()
            if pair.gave_up():
                return "a wait ended at its bound: do both streams run at one time?"
            for s in range(SETS):
                total, norm = reference([self.xs[0][s], self.xs[1][s]], self.residuals[s], self.weight)
                for rank in range(2):
                    got_norm, got = self.outs[rank][s]
                    if not same_bits(got, total):
                        return f"sum of rank {rank} in set {s}, seed {seed}"
                    error = norm_error(got_norm, norm)
                    if not error <= TOLERANCE[DTYPE]:
                        return f"norm of rank {rank} in set {s}, seed {seed}, off by {error:.2g}"
        return ""

    def time(self, setting: str, graphs: list[torch.cuda.CUDAGraph]) -> dict[str, float]:
        """Microseconds of one round; another replay is queued ahead."""
        self.replay(graphs)
        events = self.replay(graphs)
        torch.cuda.synchronize()
        if setting != "late":
            return {setting: max(b.elapsed_time(a) for b, a in events) * 1e3 / self.args.calls}
        ends0, ends1, arrivals = self.stamps[:, 1:].tolist()
        count = len(arrivals) * 1e3
        return {
            "late": sum(e - a for e, a in zip(ends1, arrivals, strict=True)) / count,
            "other": sum(e - a for e, a in zip(ends0, arrivals, strict=True)) / count,
        }

    def time_floor(self) -> float:
        """Microseconds from the end of a delay to a stamp that follows it."""
        for _ in range(2):
            with torch.cuda.stream(self.streams[1]):
                self.floor.replay()
        torch.cuda.synchronize()
        _, ends, arrivals = self.stamps[:, 1:].tolist()
        return sum(e - a for e, a in zip(ends, arrivals, strict=True)) / len(arrivals) / 1e3


def spread(us: list[float]) -> dict[str, float]:
    tenths = statistics.quantiles(us, n=10, method="inclusive")
    return {"median": statistics.median(us), "p10": tenths[0], "p90": tenths[-1]}


def compare(bench: Bench, pairs: list[Pair], said: Callable[..., None]) -> list[dict]:
    """Every way in every setting at one size: rows for the JSON file, and a line a setting."""
    rows = []
    for setting in bench.args.settings:
        graphs: dict[str, list[torch.cuda.CUDAGraph]] = {}
        wrong = False
        for pair in pairs:
            if bench.tokens > pair.way.most or (wrong and not pair.way.bounded):
                continue
            if pair.gave_up():
                pair.reset()
            try:
                made = bench.graphs(pair, setting)
                problem = bench.wrong(pair, made)
            except abi.KernelError as e:
                problem = str(e)
            wrong = wrong or bool(problem)
            if problem:
                said(f"WRONG {pair.way.name}, {setting}, {bench.tokens} x {bench.hidden}: {problem}")
                rows.append({"setting": setting, "way": pair.way.name, "wrong": problem})
            else:
                graphs[pair.way.name] = made
        times: dict[str, dict[str, list[float]]] = {}
        floors = []
        for _ in range(bench.args.rounds):
            if setting == "late":
                floors.append(bench.time_floor())
            for name, made in graphs.items():
                for what, us in bench.time(setting, made).items():
                    times.setdefault(what, {}).setdefault(name, []).append(us)
        floor = statistics.median(floors) if floors else 0.0
        for what, by_name in times.items():
            found = {name: spread([t - floor for t in us]) for name, us in by_name.items()}
            rows += ({"setting": what, "way": name, **us, "floor": floor} for name, us in found.items())
            figures = "  ".join(f"{name} {us['median']:.2f}" for name, us in found.items())
            said(f"{bench.hidden:5d} {bench.tokens:4d} {what:9s} {figures}")
    return [{"hidden": bench.hidden, "tokens": bench.tokens, **row} for row in rows]


def numbers(text: str) -> list[int]:
    return [int(v) for v in text.split(",")]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--libs", required=True, help="NAME=FILE[:cluster=N][:trigger=N][:pdl=0][:most=TOKENS],...")
    p.add_argument("--clock", help="late_rank.cu, compiled; default: compiled now")
    p.add_argument("--json", type=Path)
    p.add_argument("--hidden", type=numbers, default=[7168, 4096])
    p.add_argument("--tokens", type=numbers, default=[1, 2, 4, 8, 16, 32, 64, 128])
    p.add_argument("--settings", type=lambda s: s.split(","), default=["late", "together", "products"])
    p.add_argument("--calls", type=int, default=20)
    p.add_argument("--rounds", type=int, default=25)
    p.add_argument("--delay-cycles", type=int, default=20_000)
    p.add_argument("--timeout-s", type=float, default=1.0)
    p.add_argument("--limit-s", type=float, default=150)
    args = p.parse_args()
    watch = threading.Timer(args.limit_s, lambda: os._exit(124))
    watch.daemon = True
    watch.start()
    started = time.monotonic()
    torch.cuda.init()
    ways = ways_of(args.libs)
    clock = Clock(args.clock)
    args.streams = [torch.cuda.Stream() for _ in range(2)]
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "libs": args.libs,
        "rounds": args.rounds,
        "calls": args.calls,
    }
    rows: list[dict] = []
    for hidden in args.hidden:
        pairs = [Pair(way, hidden, max(args.tokens), args.timeout_s) for way in ways]
        for tokens in args.tokens:
            rows += compare(Bench(args, clock, hidden, tokens), pairs, lambda *what: print(*what, flush=True))
            if args.json:
                args.json.write_text(json.dumps({"schema": 1, **about, "rows": rows}, indent=1))
        torch.cuda.synchronize()
        for pair in pairs:
            pair.free()
    wrong = sum("wrong" in row for row in rows)
    print(f"{len(rows)} figures, {wrong} ways wrong, {time.monotonic() - started:.0f} s")
    os._exit(1 if wrong or not rows else 0)


if __name__ == "__main__":
    main()
