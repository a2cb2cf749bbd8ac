"""What recording costs a call and a program, and what reading and judging cost afterwards.

    python -m benchmarks.trace [--calls N] [--dir DIR]          one recorder: begin + end, reading
    python -m benchmarks.trace --program [--ranks N]            what `workbench trace` adds to small gloo collectives
    python -m benchmarks.trace --judge [--ranks 64] [--calls N] reading and judging the files of many ranks

Of one recorder: median and 99th percentile of begin + end together, in microseconds, with the cost of the timing loop
itself taken off. Of a program: blocks of recorded calls and of torch's own functions take turns in one process; of the
blocks of world rank 0 the quickest tenth is shown, since whatever else runs on the machine only adds, and the median.
Files in memory (/dev/shm) unless --dir names another place.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

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
    """One rank: blocks of 50 calls, recorded and as torch wrote them, in turn."""
    import torch
    import torch.distributed as dist

    from workbench.observe.process import OPAQUE, this_process

    functions = {True: dist.all_reduce, False: vars(dist.all_reduce)["__wrapped__"]}
    dist.init_process_group("gloo")
    x = torch.ones(8)
    elapsed: dict[bool, list[float]] = {True: [], False: []}
    worked: dict[bool, list[float]] = {True: [], False: []}
    for block in range(max(calls // 50, 20)):
        for recorded in (True, False) if block % 2 else (False, True):
            dist.barrier()
            all_reduce = functions[recorded]
            this_process.here.inside = "" if recorded else OPAQUE
            start, start_cpu = time.perf_counter(), time.thread_time()
            for _ in range(50):
                all_reduce(x)
            worked[recorded].append((time.thread_time() - start_cpu) / 50 * 1e6)
            elapsed[recorded].append((time.perf_counter() - start) / 50 * 1e6)
            this_process.here.inside = ""
    if dist.get_rank() == 0:
        print(f"all_reduce of 8 floats, {dist.get_world_size()} gloo ranks, {len(elapsed[True])} blocks of 50 calls:")
        for what, times in (("a call takes", elapsed), ("its thread computes", worked)):
            for share, at in (("quickest tenth", 0), ("median", 4)):
                plain, recorded_us = (statistics.quantiles(times[i], n=10)[at] for i in (False, True))
                print(
                    f"{what:<20}{share:<15}{plain:6.1f} us, recorded {recorded_us:6.1f} us: "
                    f"{recorded_us - plain:+.1f} us, ratio {recorded_us / plain:.3f}"
                )
        print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    dist.destroy_process_group()


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
