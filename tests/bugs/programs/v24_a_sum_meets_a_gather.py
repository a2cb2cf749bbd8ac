"""One rank all-reduces where the other all-gathers. 2 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x = torch.ones(4)
    if rank == 0 or CORRECT:
        dist.all_reduce(x)
    else:
        dist.all_gather([torch.empty(4), torch.empty(4)], x)
    print(f"rank {rank} is through")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
