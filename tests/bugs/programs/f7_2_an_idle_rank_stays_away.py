"""TensorRT-LLM 17379: a rank without tokens leaves the sum out, and its peer waits. 2 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tokens = 2 if rank == 0 else 0
    x = torch.ones(2 if CORRECT else tokens, 8)
    if x.shape[0] > 0:
        dist.all_reduce(x)
    print(f"rank {rank} is through")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
