"""torchrec 4601: the leader is chosen by its place in the group and broadcasts as that world rank. 4 ranks."""

import sys

import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def run_once(fn, group):
    """The value of fn, run by the group's leader, on every member."""
    leader = 0
    box = [fn() if dist.get_rank(group) == leader else None]
    if CORRECT:
        dist.broadcast_object_list(box, group_src=leader, group=group)
    else:
        dist.broadcast_object_list(box, src=leader, group=group)
    return box[0]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()  # all are connected: who ends early leaves nobody behind
    hosts = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    print(f"rank {rank} has {run_once(lambda: f'the plan of {rank}', hosts[rank // 2])}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
