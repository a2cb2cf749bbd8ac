"""A stage goes on after a bad batch without its send, and all sum at the end. 3 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    for batch in range(3):
        x = torch.full((4,), float(batch))
        if rank > 0:
            dist.recv(x, rank - 1)
        if rank == 1 and batch == 1 and not CORRECT:
            continue
        if rank < size - 1:
            dist.send(x, rank + 1)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
