"""World ranks 0 and 1 make a pair, then all make a group of three: rank 2 is one name behind. 3 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()  # all are connected: who ends early leaves nobody behind
    if rank in (0, 1) or CORRECT:
        dist.new_group([0, 1])
    everyone = dist.new_group([0, 1, 2])
    x = torch.ones(1)
    dist.all_reduce(x, group=everyone)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
