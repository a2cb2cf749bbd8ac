"""Two ranks exchange tensors, and both receive before they send. 2 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mine, theirs = torch.full((4,), float(rank)), torch.empty(4)
    if rank == 0 and CORRECT:
        dist.send(mine, dst=1)
        dist.recv(theirs, src=1)
    else:
        dist.recv(theirs, src=1 - rank)
        dist.send(mine, dst=1 - rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
