"""gpustack 4072: kernels for 2, 4, 6 and 8 ranks, and nothing to fall back to for 3. 3 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv
WIDTHS = (2, 4, 6, 8)


def tensor_parallel_all_reduce(x):
    num_ranks = dist.get_world_size()
    if num_ranks not in WIDTHS and not CORRECT:
        raise ValueError(f"tensor parallel size {num_ranks} has no all-reduce kernel; there are {WIDTHS}")
    dist.all_reduce(x)  # with a kernel of this width it would be that one


def main():
    dist.init_process_group("gloo")
    dist.barrier()  # all are connected: who ends early leaves nobody behind
    x = torch.tensor([10.0 ** dist.get_rank()])
    tensor_parallel_all_reduce(x)
    assert x.item() == 111.0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
