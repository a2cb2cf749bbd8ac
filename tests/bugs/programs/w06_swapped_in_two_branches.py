"""Two sums of equal shape stand in opposite order in the two branches of an if. 2 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    loss, tokens = torch.tensor([1.0 + rank]), torch.tensor([10.0 + 10 * rank])
    if rank == 0 or CORRECT:
        dist.all_reduce(loss)
        dist.all_reduce(tokens)
    else:
        dist.all_reduce(tokens)
        dist.all_reduce(loss)
    print(f"rank {rank} has {loss.item()} and {tokens.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
