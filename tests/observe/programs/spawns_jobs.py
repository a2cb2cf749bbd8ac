"""Two jobs of torch.multiprocessing, one after the other at one port or both at once at two; one of them may go wrong.

Arguments: "turn" or "once", two ports, and what rank 1 of each job does: fine, raise or skip. Two ranks a job.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def rank_body(rank, port, what):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    dist.barrier()
    if what == "raise" and rank == 1:
        raise KeyError("lost")
    if what == "skip" and rank == 1:
        time.sleep(600)
    dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()


def main():
    way, *ports = sys.argv[1:4]
    at_once = []
    for port, what in zip(ports, sys.argv[4:6], strict=True):
        at_once.append(mp.spawn(rank_body, (port, what), nprocs=2, join=False))
        if way == "turn":
            join(at_once.pop())
    for job in at_once:
        join(job)


def join(job):
    try:
        while not job.join():
            pass
    except mp.ProcessRaisedException:
        print("a rank raised", flush=True)


if __name__ == "__main__":
    main()
