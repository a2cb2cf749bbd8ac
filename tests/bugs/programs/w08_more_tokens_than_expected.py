"""An all-to-all by counts of an earlier batch: a rank is sent more rows than it has room for and aborts. 2 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv
SENT = [[1, 3], [2, 2]]  # by rank: rows to each
EXPECTED = [[1, 2], [3 if CORRECT else 2, 2]]  # by rank: rows from each


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    rows = torch.full((sum(SENT[rank]), 8), float(rank))
    received = torch.empty(sum(EXPECTED[rank]), 8)
    dist.all_to_all_single(received, rows, EXPECTED[rank], SENT[rank])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
