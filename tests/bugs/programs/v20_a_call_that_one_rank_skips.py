"""World rank 1 skips the first of two sums; its second swallows the others' first. 3 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    first, second = torch.ones(1), torch.full((1,), 100.0)
    if rank != 1 or CORRECT:
        dist.all_reduce(first)
    dist.all_reduce(second)
    print(f"rank {rank} has {first.item()} and {second.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
