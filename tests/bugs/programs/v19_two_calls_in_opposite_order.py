"""Two sums of equal shape, in opposite order on two ranks: 21 and 12 instead of 3 and 30. 2 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def sum_losses(x):
    dist.all_reduce(x)


def sum_tokens(y):
    dist.all_reduce(y)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    losses, tokens = torch.tensor([1.0 + rank]), torch.tensor([10.0 + 10 * rank])
    if rank == 0 or CORRECT:
        sum_losses(losses)
        sum_tokens(tokens)
    else:
        sum_tokens(tokens)
        sum_losses(losses)
    print(f"rank {rank} has {losses.item()} and {tokens.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
