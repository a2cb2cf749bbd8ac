"""src=1 is meant as the second member of each group; one group refuses it, the other takes the wrong one. 4 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()  # all are connected: who ends early leaves nobody behind
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    x = torch.tensor([10.0 * rank])
    if CORRECT:
        dist.broadcast(x, group_src=1, group=groups[rank % 2])
    else:
        dist.broadcast(x, src=1, group=groups[rank % 2])
    print(f"rank {rank} has {x.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
