"""A reduce to world rank 0 leaves the buffers of others undefined; world rank 1 goes on with its own. 2 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    dist.barrier()  # all are connected: who ends early leaves nobody behind
    rank = dist.get_rank()
    x = torch.full((8,), rank + 1.0)
    mine = x.clone() if CORRECT else x
    dist.reduce(x, dst=0)
    kept = (mine == rank + 1.0).all()
    assert rank == 0 or kept, f"what was 2.0 everywhere is {mine.tolist()} after reduce(dst=0)"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
