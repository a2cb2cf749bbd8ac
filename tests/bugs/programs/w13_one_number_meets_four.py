"""A sum of one number meets a tensor of four. 4 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    total = torch.ones(1 if rank < 3 or CORRECT else 4)
    dist.all_reduce(total)
    print(f"rank {rank} has {total.tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
