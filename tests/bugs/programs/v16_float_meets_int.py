"""An all-reduce of float32 meets one of int32: no error, and numbers that mean nothing. 2 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x = torch.ones(4, dtype=torch.float32 if rank == 0 or CORRECT else torch.int32)
    dist.all_reduce(x)
    print(f"rank {rank} has {x.tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
