"""Two members of a group each wait for the other as its root; the rest waits for them in a sum over all. 4 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    x = torch.ones(4)
    dist.broadcast(x, group_src=1 - rank % 2 if rank >= 2 and not CORRECT else 0, group=group)
    dist.all_reduce(x)
    print(f"rank {rank} has {x.tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
