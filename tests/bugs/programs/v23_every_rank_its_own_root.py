"""Each rank broadcasts from itself: all send, nobody receives. 3 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x = torch.tensor([float(rank)])
    dist.broadcast(x, src=0 if CORRECT else rank)
    print(f"rank {rank} has {x.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
