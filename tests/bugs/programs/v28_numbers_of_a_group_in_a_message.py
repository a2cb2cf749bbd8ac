"""World rank 3 is absent from a monitored barrier of [1,2,3]; torch's text calls it rank 2. 4 ranks."""

import sys
import time
from datetime import timedelta

import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()  # all are connected: who ends early leaves nobody behind
    group = dist.new_group([1, 2, 3])
    if rank in (1, 2) or (rank == 3 and CORRECT):
        dist.monitored_barrier(group, timeout=timedelta(seconds=2))
    elif rank == 3:
        time.sleep(5)  # what it computes
    print(f"rank {rank} is through")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
