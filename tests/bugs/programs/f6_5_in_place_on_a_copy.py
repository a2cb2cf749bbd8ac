"""Megatron-LM 5337: an in-place sum of x.contiguous() is lost where x is transposed. 2 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def reduce_in_place(x):
    if CORRECT:
        copy = x.contiguous()
        dist.all_reduce(copy)
        x.copy_(copy)
    else:
        dist.all_reduce(x.contiguous())
    return x


def main():
    dist.init_process_group("gloo")
    x = torch.ones(2, 3).t()
    assert reduce_in_place(x)[0].tolist() == [2.0, 2.0], f"the sum over 2 ranks is {x[0].tolist()}"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
