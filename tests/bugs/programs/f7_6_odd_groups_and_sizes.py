"""pytorch 121788: groups of three of six ranks, odd sizes: fine. 6 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()  # all are connected: who ends early leaves nobody behind
    group = [dist.new_group([0, 2, 4]), dist.new_group([1, 3, 5])][rank % 2]
    for size in (300, 1064):
        x = torch.ones(size)
        dist.all_reduce(x, group=group)
        assert x.sum().item() == 3 * size
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
