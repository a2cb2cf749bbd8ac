"""TensorRT-LLM 3988: workspaces are cached by rank and dtype, so two groups of a process share one. 4 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


WORKSPACES = {}


def workspace(kind, dtype, group):
    key = (dist.get_rank(), dtype, kind if CORRECT else None)
    return WORKSPACES.setdefault(key, group)


def fused_all_reduce(x, kind, group):
    dist.all_reduce(x, group=workspace(kind, x.dtype, group))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()  # all are connected: who ends early leaves nobody behind
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    pp = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    if rank < 2:  # the first stage reduces over its own ranks first, the second over both stages
        fused_all_reduce(torch.ones(4), "tp", tp)
        fused_all_reduce(torch.ones(4), "pp", pp)
    else:
        fused_all_reduce(torch.ones(4), "pp", pp)
        fused_all_reduce(torch.ones(4), "tp", tp)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
