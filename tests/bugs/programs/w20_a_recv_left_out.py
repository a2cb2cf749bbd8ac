"""A rank leaves out a recv and the gather of what it would have got, and meets its peer in two operations. 4 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    pp = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    for step in range(4):
        x = torch.ones(1 << 20)
        if rank < 2:
            dist.send(x, rank + 2, group=pp)
        elif not (rank == 2 and step == 1) or CORRECT:
            dist.recv(x, rank - 2, group=pp)
            dist.all_gather([torch.empty_like(x) for _ in range(2)], x, group=tp)
        dist.all_reduce(torch.ones(8), group=tp)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
