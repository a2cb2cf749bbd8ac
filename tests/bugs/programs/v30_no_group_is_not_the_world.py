"""A helper asks for the world rank of place 0 of group None. 2 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def broadcast_from_first(x, group=None):
    if CORRECT and group is None:
        group = dist.group.WORLD
    dist.broadcast(x, src=dist.get_global_rank(group, 0), group=group)


def main():
    dist.init_process_group("gloo")
    dist.barrier()  # all are connected: who ends early leaves nobody behind
    broadcast_from_first(torch.ones(1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
