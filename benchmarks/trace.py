"""What recording costs a call and a program, and what reading and judging cost afterwards.

    python -m benchmarks.trace [--calls N] [--dir DIR]          one recorder: begin + end, reading
    python -m benchmarks.trace --program [--ranks N]            what `workbench trace` adds to small gloo collectives
    python -m benchmarks.trace --judge [--ranks 64] [--calls N] reading and judging the files of many ranks

Of one recorder: median and 99th percentile of begin + end together, in microseconds, with the cost of the timing loop
itself taken off. Of a program: blocks of recorded calls and of what torch wrote, nothing of ours in it, take turns on
the same ranks; shown are quartiles over the rounds of world rank 0, of the differences and ratios within a round too.
What a call takes varies by more than recording adds, so its share is told by what the calling thread computes more.
Files in memory (/dev/shm) unless --dir names another place.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from types import FunctionType
from typing import Any

from workbench.diagnose import diagnose
from workbench.observe import read_observed, recorded_environment
from workbench.ranks import GroupKey
from workbench.trace import Lane, Recorder, read_directory, read_progress

GROUP = GroupKey("tp", (0, 1, 2, 3))


def call(lane: Lane) -> None:
    """What the runtime does around one fused call."""
    token = lane.begin("all_reduce_add_rms_norm", shape=(128, 4096), dtype="bfloat16", path="shm", reduce_op="sum")
    lane.end(token)


def call_with_note(lane: Lane) -> None:
    """The same with a note of 40 bytes, which takes a record of its own."""
    token = lane.begin("all_reduce_add_rms_norm", shape=(128, 4096), dtype="bfloat16", path="shm", reduce_op="sum")
    lane.end(token, note="fell back to nccl: no peer access to it")


def call_with_new_shape(lane: Lane, shapes: list[int] = [0]) -> None:  # noqa: B006  # a counter across calls, on purpose
    """The slow path: a shape that was never seen before."""
    shapes[0] += 1
    token = lane.begin("all_reduce", shape=(shapes[0], 4096), dtype="bfloat16", path="shm", reduce_op="sum")
    lane.end(token)


def nothing(_: Lane) -> None:
    """The timing loop alone."""


def time_us(fn: Callable[[Lane], None], lane: Lane, calls: int) -> tuple[float, float]:
    """Median and 99th percentile of one call, in microseconds."""
    samples = []
    for _ in range(calls):
        start = time.perf_counter_ns()
        fn(lane)
        samples.append(time.perf_counter_ns() - start)
    samples.sort()
    return samples[calls // 2] / 1000, samples[calls * 99 // 100] / 1000


def program(ranks: int, calls: int, directory: str) -> None:
    """Start the ranks, recorded, as `workbench trace` does."""
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | os.environ
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*torchrun, "-m", "benchmarks.trace", "--rank-body", "--calls", str(calls)]
    subprocess.run(command, env=recorded_environment(environment, directory), check=True, timeout=600)


def rank_body(calls: int) -> None:
    """One rank: rounds of four blocks of 100 calls, as torch wrote them, recorded, recorded, as torch wrote them."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    x = torch.ones(8)
    put = _both_forms(dist)
    wall: list[tuple[float, float]] = []  # a round: us a call, as torch wrote it and recorded
    cpu: list[tuple[float, float]] = []
    for _ in range(max(calls // 200, 10)):
        times = []
        for recorded in (False, True, True, False):
            all_reduce = put(recorded)
            for _ in range(10):
                all_reduce(x)
            dist.barrier()
            start, start_cpu = time.perf_counter(), time.thread_time()
            for _ in range(100):
                all_reduce(x)
            times.append((time.perf_counter() - start, time.thread_time() - start_cpu))
        put(True)
        for found, of in ((wall, 0), (cpu, 1)):
            one, two, three, four = (t[of] / 200 * 1e6 for t in times)
            found.append((one + four, two + three))
    if dist.get_rank() == 0:
        print(
            f"all_reduce of 8 floats, {dist.get_world_size()} gloo ranks, {len(wall)} rounds of 4 blocks of 100 calls;"
        )
        print(f"load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores. Quartiles over the rounds:")
        for what, rounds in (("a call takes", wall), ("its thread computes", cpu)):
            plain, recorded_us = (statistics.quantiles(of, n=4) for of in zip(*rounds, strict=True))
            more = statistics.quantiles([b - a for a, b in rounds], n=4)
            ratio = statistics.quantiles([b / a for a, b in rounds], n=4)
            print(
                f"{what:<20}{_quartiles(plain)} us, recorded{_quartiles(recorded_us)} us: "
                f"more by{_quartiles(more)} us, ratio{_quartiles(ratio, 3)}"
            )
        plain_us, more_us = (statistics.median(of) for of in ([a for a, _ in wall], [b - a for a, b in cpu]))
        print(f"{'share of a call':<20}{more_us / plain_us:8.2%}: what its thread computes more, of what a call takes")
    dist.destroy_process_group()


def _quartiles(values: list[float], digits: int = 1) -> str:
    return " /".join(f"{value:{digits + 5}.{digits}f}" for value in values)


def _both_forms(dist: Any) -> Callable[[bool], Callable[..., Any]]:
    """A function that gives all_reduce as it is recorded, or as torch wrote it, and puts what it calls in that form."""
    bind = ctypes.pythonapi.PyInstanceMethod_New  # what pybind11 makes of a C++ method, and __wrapped__ is not
    bind.restype, bind.argtypes = ctypes.py_object, [ctypes.py_object]
    recorded_all_reduce = dist.all_reduce
    methods = [(c, name, m) for c in (dist.ProcessGroup, dist.Work) for name, m in vars(c).items()]
    methods = [(c, name, m) for c, name, m in methods if isinstance(m, FunctionType) and hasattr(m, "__wrapped__")]

    def put(recorded: bool) -> Callable[..., Any]:
        for owner, name, ours in methods:
            setattr(owner, name, ours if recorded else bind(vars(ours)["__wrapped__"]))
        found = recorded_all_reduce if recorded else vars(recorded_all_reduce)["__wrapped__"]
        assert callable(found)
        return found

    return put


def judge(ranks: int, calls: int, directory: str) -> None:
    """Write the files of many ranks as a program would leave them, then read and judge them."""
    world = GroupKey("world", tuple(range(ranks)))
    for world_rank in range(ranks):
        with Recorder.open(directory, world_rank) as recorder:
            lane = recorder.group(world, label="0")
            for number in range(calls // 2):
                lane.end(lane.begin("all_reduce", shape=(8, number % 50), dtype="float32", reduce_op="sum"))
    start = time.perf_counter()
    trace = read_observed(directory)
    read = time.perf_counter()
    findings = diagnose(trace)
    judged = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    print(f"{ranks} ranks, {len(trace.events)} events: read in {read - start:.1f} s, judged in {judged - read:.1f} s, ")
    print(f"{len(findings)} findings, {peak:.2f} GiB at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=50_000)
    parser.add_argument("--dir", default="/dev/shm")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--program", action="store_true")
    parser.add_argument("--judge", action="store_true")
    parser.add_argument("--rank-body", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_body:
        rank_body(options.calls)
        return
    directory = tempfile.mkdtemp(prefix="workbench-trace-", dir=options.dir)
    try:
        if options.program:
            program(options.ranks or 2, min(options.calls, 10_000), directory)
            return
        if options.judge:
            judge(options.ranks or 64, min(options.calls, 10_000), directory)
            return
        with Recorder.open(directory, 0) as recorder:
            lane = recorder.group(GROUP, label="tp", ordinal=1)
            base, _ = time_us(nothing, lane, options.calls)
            cases = [
                ("recorder off", call, Recorder.off().group(GROUP)),
                ("begin + end", call, lane),
                ("begin + end, note of 40 bytes", call_with_note, lane),
                ("begin + end, new shape each time", call_with_new_shape, lane),
            ]
            for name, fn, on in cases:
                median, p99 = time_us(fn, on, options.calls)
                print(f"{name:<34} median {median - base:6.2f} us   p99 {p99 - base:6.2f} us   ({options.calls} calls)")
            path = recorder.path
            assert path is not None
            start = time.perf_counter()
            read_progress(path)
            print(f"{'progress of a live rank':<34} {(time.perf_counter() - start) * 1e3:.3f} ms")
        start = time.perf_counter()
        trace = read_directory(directory)
        elapsed = time.perf_counter() - start
        print(f"{'reading a full file':<34} {elapsed:.2f} s for {len(trace.events)} events")
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
