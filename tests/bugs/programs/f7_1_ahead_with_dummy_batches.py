"""vllm 28224: a rank that is done runs dummy batches with one sync more, and gets ahead. 2 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


STEPS = (10, 7)  # batches that world ranks 0 and 1 have


def run_batch():
    dist.all_reduce(torch.ones(1, 8))


def run_dummy_batch():
    if not CORRECT:
        dist.all_reduce(torch.zeros(1, 8))  # is anybody still busy?
    dist.all_reduce(torch.zeros(1, 8))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for step in range(max(STEPS)):
        if step < STEPS[rank]:
            run_batch()
        else:
            run_dummy_batch()
    print(f"rank {rank} is through")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
