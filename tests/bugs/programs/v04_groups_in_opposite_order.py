"""Two halves make both groups, each its own first: both get the same internal name. 4 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()  # all are connected: who ends early leaves nobody behind
    lists = [[0, 1], [2, 3]]
    own_first = lists if rank < 2 or CORRECT else lists[::-1]
    made = {tuple(ranks): dist.new_group(ranks) for ranks in own_first}
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=made[tuple(lists[rank // 2])])
    print(f"rank {rank} has {x.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
