"""Each group's leader is to share its settings; group= is forgotten and all get world rank 0's. 4 ranks."""

import sys

import torch.distributed as dist

import workbench
from workbench.ranks import GroupMap

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()  # all are connected: who ends early leaves nobody behind
    workbench.declare(GroupMap.custom({"tp": [[0, 1], [2, 3]]}))
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    settings = [f"settings of {rank}"]
    if CORRECT:
        dist.broadcast_object_list(settings, group_src=0, group=tp)
    else:
        dist.broadcast_object_list(settings, src=0)
    print(f"rank {rank} has the {settings[0]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
