"""Each rank puts a number of its own before the keys under which the ranks are to meet, as after a restart. 2 ranks."""

import os
import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), size, is_master=False)
    attempt = 0 if CORRECT else rank
    dist.init_process_group("gloo", store=dist.PrefixStore(f"attempt-{attempt}", store), rank=rank, world_size=size)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
