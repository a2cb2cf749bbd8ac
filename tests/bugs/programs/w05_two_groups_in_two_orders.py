"""Two groups of the same ranks are entered in opposite order: each rank waits in the other's second call. 2 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups if rank == 0 or CORRECT else groups[::-1]:
        dist.all_reduce(torch.ones(4), group=group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
