"""World rank 1 waits for a key of the store that nobody writes. 2 ranks."""

import sys
from datetime import timedelta

import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("weights/ready" if CORRECT else "weights/done", "1")
    else:
        store.wait(["weights/ready"], timedelta(seconds=2))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
