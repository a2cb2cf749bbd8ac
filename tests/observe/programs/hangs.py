"""World rank 1 sleeps for a quarter of an hour; with the argument `all` every rank sleeps for a moment."""

import sys
import time

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    dist.barrier()
    if "all" in sys.argv:
        time.sleep(8)
    elif dist.get_rank() == 1:
        time.sleep(900)
    dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
