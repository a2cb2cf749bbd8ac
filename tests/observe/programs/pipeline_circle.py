"""World ranks 0 and 1 receive from each other before they send; each later rank waits for the one before it."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, size = dist.get_rank(), dist.get_world_size()
    peer = 1 if rank == 0 else rank - 1
    dist.barrier()
    dist.irecv(torch.empty(4), peer).wait()
    dist.isend(torch.ones(4), (rank + 1) % size).wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
