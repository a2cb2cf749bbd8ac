"""Handles are exchanged under keys with a counter of the process: after a subgroup, members differ. 3 ranks."""

import sys
from datetime import timedelta

import torch.distributed as dist

CORRECT = "--correct" in sys.argv


class Exchange:
    """Handles by way of the store; the number in the key tells one exchange from the next."""

    def __init__(self, store, rank):
        self.store, self.rank = store, rank
        self.numbers = {}

    def gather(self, members, handle):
        counter = tuple(members) if CORRECT else "process"
        number = self.numbers[counter] = self.numbers.get(counter, -1) + 1
        keys = [f"exchange/{len(members)}/{number}/{m}" for m in members]
        self.store.set(f"exchange/{len(members)}/{number}/{self.rank}", handle)
        self.store.wait(keys, timedelta(seconds=2))
        return [self.store.get(key) for key in keys]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    exchange = Exchange(dist.distributed_c10d._get_default_store(), rank)
    if rank < 2:
        exchange.gather([0, 1], "handle")
    exchange.gather([0, 1, 2], "handle")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
