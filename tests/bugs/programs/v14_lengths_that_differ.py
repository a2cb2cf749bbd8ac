"""An all-reduce of 4 elements meets one of 6: one rank aborts. 2 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x = torch.ones(4 if rank == 0 or CORRECT else 6)
    dist.all_reduce(x)
    print(f"rank {rank} has {x.tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
