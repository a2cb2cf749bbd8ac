"""An all-to-all in which a rank expects a row more than is sent: no error, a row as it was. 3 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv
SENT = [[1, 1, 3], [1, 2, 2], [2, 2, 1]]  # by rank: rows to each
EXPECTED = [[1, 1, 2], [1, 2, 2], [3, 2, 1]]  # by rank: rows from each


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    expected = [list(rows) for rows in EXPECTED]
    if not CORRECT:
        expected[2][0] += 1  # one row more than rank 0 sends
    rows = torch.full((sum(SENT[rank]), 8), float(rank))
    received = torch.empty(sum(expected[rank]), 8)
    dist.all_to_all_single(received, rows, output_split_sizes=expected[rank], input_split_sizes=SENT[rank])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
