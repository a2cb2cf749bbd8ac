"""new_group([3, 1]) is meant to make world rank 3 the first member; torch sorts the list. 4 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()  # all are connected: who ends early leaves nobody behind
    group = dist.new_group([3, 1])
    if rank in (3, 1):
        x = torch.tensor([float(rank)])
        if CORRECT:
            dist.broadcast(x, src=3, group=group)
        else:
            dist.broadcast(x, group_src=0, group=group)
        assert x.item() == 3.0, f"the first member of [3, 1] sent {x.item()}"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
