"""flashinfer 3418: a communication backend hands its root, a place in the group, on as src. 4 ranks."""

import sys

import torch.distributed as dist

CORRECT = "--correct" in sys.argv


class CommBackend:
    """What a fused kernel's workspace talks through."""

    def __init__(self, group):
        self.group = group

    def bcast(self, handle, root):
        box = [handle]
        src = dist.get_global_rank(self.group, root) if CORRECT else root
        dist.broadcast_object_list(box, src=src, group=self.group)
        return box[0]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()  # all are connected: who ends early leaves nobody behind
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    print(f"rank {rank} has the {CommBackend(tp).bcast(f'handle of {rank}', root=0)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
