"""An all-reduce of 4x6 meets one of 6x4: summed as it lies in memory, and no error. 2 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x = torch.arange(24.0).view((4, 6) if rank == 0 or CORRECT else (6, 4))
    dist.all_reduce(x)
    print(f"rank {rank} has {x[0].tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
