"""World rank 0 sums what 1 and 2 take the maximum of: no error, 4 everywhere. 3 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x, op=dist.ReduceOp.SUM if rank == 0 or CORRECT else dist.ReduceOp.MAX)
    print(f"rank {rank} has {x.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
