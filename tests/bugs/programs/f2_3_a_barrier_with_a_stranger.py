"""pytorch 130102: groups [0,3] and [1,2], each made by its members only, share a name. 4 ranks."""

import sys

import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()  # all are connected: who ends early leaves nobody behind
    pairs = [[0, 3], [1, 2]]
    groups = [dist.new_group(pair) for pair in pairs if rank in pair or CORRECT]
    own = groups[0] if len(groups) == 1 else groups[0 if rank in pairs[0] else 1]
    for _ in range(20):
        dist.barrier(group=own)
    print(f"rank {rank} is through")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
