"""A stage tags its sends by the microbatch from 0, the next stage its receives from 1. 2 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    first = 0 if CORRECT else 1
    for microbatch in range(3):
        x = torch.full((4,), float(microbatch))
        if rank == 0:
            dist.send(x, 1, tag=microbatch)
        else:
            dist.recv(x, 0, tag=first + microbatch)
    dist.barrier()
    print(f"rank {rank} is through", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
