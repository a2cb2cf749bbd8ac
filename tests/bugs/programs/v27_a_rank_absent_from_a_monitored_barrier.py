"""World rank 2 is elsewhere while the others meet in a monitored barrier. 3 ranks."""

import sys
import time
from datetime import timedelta

import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank != 2 or CORRECT:
        dist.monitored_barrier(timeout=timedelta(seconds=2))
    else:
        time.sleep(5)  # what it computes
    print(f"rank {rank} is through")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
