"""sglang 38952: a rank without tokens fails at reshaping nothing, and its peer waits. 2 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def rows(x):
    return x if CORRECT else x.view(x.shape[0], -1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tokens = torch.tensor([2 if rank == 0 else 0])
    x = torch.ones(int(tokens), 8)
    x = rows(x)
    dist.all_reduce(tokens)
    print(f"rank {rank} is through with {x.shape[0]} of {tokens.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
