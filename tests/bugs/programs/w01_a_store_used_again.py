"""The process group is destroyed and made again on the same store, where the first one's keys still stand. 2 ranks."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # all are connected: who ends early leaves nobody behind
    kept = dist.distributed_c10d._get_default_store()
    for attempt in range(2):
        store = dist.PrefixStore(f"attempt {attempt}", kept) if CORRECT else kept
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20))
        dist.all_reduce(torch.ones(1))
        print(f"rank {rank} is through with attempt {attempt}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
