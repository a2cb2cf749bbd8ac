"""Two groups of two; the first exchanges handles and forgets group=. 4 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()  # all are connected: who ends early leaves nobody behind
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    if rank < 2:
        handles = [None] * 2 if CORRECT else [None] * 4
        dist.all_gather_object(handles, f"handle of {rank}", group=tp if CORRECT else None)
    x = torch.ones(1)
    dist.all_reduce(x, group=tp)
    print(f"rank {rank} has {x.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
