"""One rank calls barrier twice, the other once and goes on with its own work. 2 ranks."""

import sys
import time

import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()
    if rank == 0 or CORRECT:
        dist.barrier()
    print(f"rank {rank} is through", flush=True)
    if rank == 1 and not CORRECT:
        time.sleep(5)  # what it computes
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
