"""A rank leaves out one sum over all and waits in the next layer for a rank that waits for it there. 4 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    everyone = dist.new_group([0, 1, 2, 3])
    for step in range(4):
        for _ in range(3):
            dist.all_reduce(torch.ones(8), group=tp)
        if not (rank == 1 and step == 1) or CORRECT:
            dist.all_reduce(torch.ones(()), group=everyone)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
