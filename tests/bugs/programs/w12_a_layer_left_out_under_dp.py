"""One rank leaves out the sum of one layer of one step; everybody then waits in another group for somebody. 4 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def layer(group, is_left_out):
    if not is_left_out:
        dist.all_reduce(torch.ones(4), group=group)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    dp = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    for step in range(3):
        for number in range(2):
            layer(tp, (rank, step, number) == (3, 1, 1) and not CORRECT)
        dist.all_reduce(torch.ones(8), group=dp)
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
