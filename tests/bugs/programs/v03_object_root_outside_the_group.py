"""Every group takes its settings from src=0: right in the first group, an error in the second. 4 ranks."""

import sys

import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()  # all are connected: who ends early leaves nobody behind
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    settings = [f"settings of {rank}"]
    leader = rank // 2 * 2 if CORRECT else 0
    dist.broadcast_object_list(settings, src=leader, group=groups[rank // 2])
    print(f"rank {rank} has the {settings[0]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
