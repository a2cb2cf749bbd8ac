"""A stage expects a shorter sequence than the one before it sends. 2 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        work = dist.isend(torch.ones(8, 2, 16), 1)
    else:
        work = dist.irecv(torch.empty(8, 32) if CORRECT else torch.empty(4, 2, 16), 0)
    work.wait()
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
