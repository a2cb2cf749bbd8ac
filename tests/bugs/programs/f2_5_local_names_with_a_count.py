"""pytorch 173608: names of locally synchronised groups hold a count of the process. 4 ranks."""

import sys

import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()  # all are connected: who ends early leaves nobody behind
    if CORRECT:
        dist.new_group([0, 3])
        stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        stage = stages[rank // 2]
    else:
        if rank in (0, 3):
            dist.new_group([0, 3], use_local_synchronization=True)
        stage = dist.new_group([[0, 1], [2, 3]][rank // 2], use_local_synchronization=True)
    dist.barrier(group=stage)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
