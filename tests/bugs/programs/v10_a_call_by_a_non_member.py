"""World rank 2 reduces over a group it is not in: nothing happens to its tensor. 3 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()  # all are connected: who ends early leaves nobody behind
    group = dist.new_group([0, 1, 2] if CORRECT else [0, 1])
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    print(f"rank {rank} has {x.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
