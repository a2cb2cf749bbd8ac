"""vllm 25906: the padded size is chosen from the local number of tokens: 6 meets 8. 2 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


BUCKETS = (4, 6, 8)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tokens = torch.tensor([(5, 7)[rank]])
    if CORRECT:
        dist.all_reduce(tokens, op=dist.ReduceOp.MAX)
    padded = next(b for b in BUCKETS if b >= tokens.item())
    x = torch.ones(padded, 4)
    dist.all_reduce(x)
    print(f"rank {rank} is through with {padded} rows")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
