"""What recording costs a call, and reading costs afterwards.

    python -m benchmarks.trace [--calls N] [--dir DIR]

Prints one line a measurement: median and 99th percentile of begin + end together, in microseconds, with the cost of the
timing loop itself taken off. Files in memory (/dev/shm) unless --dir names another place.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=50_000)
    parser.add_argument("--dir", default="/dev/shm")
    options = parser.parse_args()
    directory = tempfile.mkdtemp(prefix="workbench-trace-", dir=options.dir)
    try:
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
