"""The leader of a group is given as src=0, which is no member of group [2,3]. Needs 4 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()  # all are connected: who ends early leaves nobody behind
    group = dist.new_group([2, 3])
    if rank in (2, 3):
        x = torch.tensor([float(rank)])
        dist.broadcast(x, src=2 if CORRECT else 0, group=group)
        print(f"rank {rank} has {x.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
