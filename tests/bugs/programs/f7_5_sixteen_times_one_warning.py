"""vllm 14447: sixteen ranks are not in the table, and every worker says so for itself. 16 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv
WIDTHS = (2, 4, 6, 8)


def warn_of_fallback():
    """How many lines this worker has written."""
    num_ranks = dist.get_world_size()
    if num_ranks in WIDTHS or (CORRECT and dist.get_rank() != 0):
        return 0
    print(f"custom all-reduce is off: it does not serve {num_ranks} ranks", file=sys.stderr)
    return 1


def main():
    dist.init_process_group("gloo")
    lines = torch.tensor([warn_of_fallback()])
    dist.all_reduce(lines)
    assert lines.item() == 1, f"the group was told {lines.item()} times that it falls back"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
