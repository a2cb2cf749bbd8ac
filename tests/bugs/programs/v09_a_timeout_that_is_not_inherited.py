"""The job's timeout of 4 s does not bound a new_group that world rank 2 left out. 3 ranks."""

import sys
from datetime import timedelta

import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=4))
    rank = dist.get_rank()
    for ranks in [[0, 1], [0, 2], [1, 2]]:
        if rank != 2 or ranks != [0, 1] or CORRECT:
            dist.new_group(ranks)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
