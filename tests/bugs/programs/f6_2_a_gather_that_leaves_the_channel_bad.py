"""pytorch 174844: a gather of a matrix meets one of a scalar; a barrier follows. 2 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x = torch.ones((3, 4) if rank == 0 or CORRECT else ())
    dist.all_gather([torch.empty_like(x), torch.empty_like(x)], x)
    dist.barrier()
    print(f"rank {rank} is through")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
