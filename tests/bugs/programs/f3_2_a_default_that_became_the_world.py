"""flashinfer 3247: the library's default group became the world; one replica warms up first. 4 ranks."""

import sys

import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def create_workspace(world_size, comm=None):
    """A library's function; comm was required once."""
    handles = [None] * dist.get_world_size(comm)
    dist.all_gather_object(handles, "handle", group=comm)
    assert len(handles) == world_size, f"asked for {world_size} peers, found {len(handles)}"
    return handles


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()  # all are connected: who ends early leaves nobody behind
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    if rank < 2:
        create_workspace(2, tp) if CORRECT else create_workspace(2)
    dist.barrier(group=tp)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
