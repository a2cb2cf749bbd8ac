"""pytorch 149200: two jobs of two ranks share a group of four, whose places are taken for world ranks. 4 ranks."""

import os
import sys
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

CORRECT = "--correct" in sys.argv
LIMIT = timedelta(seconds=60)


def joined_group(store, place):
    group, _ = distributed_c10d._new_process_group_helper(
        4, place, [], "gloo", dist.PrefixStore("joined", store), group_name="joined", timeout=LIMIT
    )
    return group


def broadcast_weights(box, place, group):
    if CORRECT:
        dist.broadcast_object_list(box, group_src=place, group=group)
    else:
        dist.broadcast_object_list(box, src=dist.get_global_rank(group, place), group=group)


def main():
    place = int(os.environ["RANK"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, timeout=LIMIT)
    job = dist.PrefixStore(f"job {place // 2}", store)
    dist.init_process_group("gloo", store=job, rank=place % 2, world_size=2)
    joined = joined_group(store, place)
    dist.barrier(group=joined)  # all are connected: who ends early leaves nobody behind
    box = [f"weights of {place}"]
    broadcast_weights(box, 3, joined)
    assert box == ["weights of 3"], box
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
