"""apex 19: gradients are summed in the order of a dict, which differs from rank to rank. 2 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


GRADIENTS = {"query": (2, 6), "key": (6, 2), "value": (3, 4), "out": (4, 3)}


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    names = list(GRADIENTS) if rank == 0 else ["value", "query", "out", "key"]
    for name in sorted(names) if CORRECT else names:
        dist.all_reduce(torch.ones(GRADIENTS[name]))
    print(f"rank {rank} is through")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
