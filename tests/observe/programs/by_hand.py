"""Two engines without a rank that make a group by hand, as vLLM's do for data parallelism, and agree on each step.

PORT WAY: "fine"; "leaves": engine 1 leaves the loop at the fourth step and serves on; "raises"; "late": engine 1 never
comes to make the group; "workers": afterwards each becomes a rank of another world, under the other's number.
"""

import multiprocessing
import sys
import time
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, Store, TCPStore

SIZE = 2


def make_group(store: Store, name: str, rank: int, size: int) -> ProcessGroup:
    store = PrefixStore(name, store)
    group = ProcessGroup(store, rank, size)
    backend = ProcessGroupGloo(store, rank, size, timeout=timedelta(seconds=60))
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    return group


def connect(port: int, engine: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, None, engine == 0, timedelta(seconds=60), wait_for_workers=False)


def serve(rank: int, port: int, way: str) -> None:
    if way == "late" and rank == 1:
        time.sleep(100)
    store = connect(port, rank)
    group = make_group(store, "engines", rank, SIZE)
    unfinished = torch.ones(1)
    for step in range(5):
        if way == "leaves" and rank == 1 and step == 3:
            time.sleep(100)
        if way == "raises" and rank == 1 and step == 3:
            raise MemoryError("no room for this request")
        dist.all_reduce(unfinished, dist.ReduceOp.MAX, group=group)  # agree
    if way == "fine":
        seen = weakref.ref(group)
        group.shutdown()
        del group
        print("gone" if seen() is None else "kept", flush=True)
    if way == "workers":
        dist.init_process_group("gloo", store=PrefixStore("workers", store), rank=1 - rank, world_size=SIZE)
        dist.all_reduce(unfinished)
        dist.all_reduce(unfinished, group=group)
        dist.destroy_process_group()
        dist.all_reduce(unfinished, group=group)  # who holds the store stays until all are done


if __name__ == "__main__":
    port, way = int(sys.argv[1]), sys.argv[2]
    context = multiprocessing.get_context("spawn")
    engines = [context.Process(target=serve, args=(r, port, way)) for r in range(SIZE)]
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.join()
    sys.exit(max(abs(engine.exitcode or 0) for engine in engines))
