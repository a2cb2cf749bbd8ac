"""vllm 45917: TP2 x DP2; a replica makes its workspace without a group while the other steps. 4 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


class Workspace:
    """Handles of all peers' buffers."""

    def __init__(self, group=None):
        handles = [None] * dist.get_world_size(group)
        dist.all_gather_object(handles, f"handle of {dist.get_rank()}", group=group)
        self.handles = handles


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()  # all are connected: who ends early leaves nobody behind
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    for step in range(3):
        if step == 1 and rank < 2:  # the first replica gets a large batch
            Workspace(tp if CORRECT else None)
        dist.all_reduce(torch.ones(8), group=tp)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
