"""Ranks that torch.multiprocessing starts, by the method its argument names; they learn their rank as an argument."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def rank_body(rank, port, fail):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    x = torch.ones(2) * (rank + 1)
    dist.all_reduce(x)
    print(f"RESULT {rank} {x.sum().item()}", flush=True)
    dist.destroy_process_group()
    if fail and rank == 1:
        raise KeyError("lost")


def main():
    method, port, fail = sys.argv[1], sys.argv[2], "fail" in sys.argv
    mp.start_processes(rank_body, (port, fail), nprocs=2, start_method=method)


if __name__ == "__main__":
    main()
