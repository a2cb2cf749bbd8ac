"""Two 16-bit types meet in an all-reduce of ones: no error, 1.0078 and 1.8760 instead of 2. 2 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x = torch.ones(4, dtype=torch.bfloat16 if rank == 0 or CORRECT else torch.float16)
    dist.all_reduce(x)
    print(f"rank {rank} has {x.tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
