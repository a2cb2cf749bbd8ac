"""pytorch 38375: each half makes its own group behind an if, then gathers. 4 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()  # all are connected: who ends early leaves nobody behind
    if CORRECT:
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        half = halves[rank // 2]
    elif rank < 2:
        half = dist.new_group([0, 1])
    else:
        half = dist.new_group([2, 3])
    parts = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(parts, torch.tensor([float(rank)]), group=half)
    print(f"rank {rank} has {[p.item() for p in parts]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
