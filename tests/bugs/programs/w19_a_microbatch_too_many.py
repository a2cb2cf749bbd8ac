"""In one step the second stage counts a microbatch more than the first sends. 2 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    stages = dist.new_group([0, 1])
    for step in range(3):
        for _ in range(5 if rank == 1 and step == 1 and not CORRECT else 4):
            if rank == 0:
                dist.send(torch.ones(8), 1, group=stages)
            else:
                dist.recv(torch.empty(8), 0, group=stages)
        dist.all_reduce(torch.ones(()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
