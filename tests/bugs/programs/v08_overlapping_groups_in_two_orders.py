"""World rank 2 makes the two overlapping groups in the other order. 3 ranks."""

import sys

import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    lists = [[0, 1], [0, 2]]
    for ranks in lists if rank < 2 or CORRECT else lists[::-1]:
        dist.new_group(ranks)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
