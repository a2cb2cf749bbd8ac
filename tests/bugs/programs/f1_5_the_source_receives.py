"""tokenspeed 786: a helper compares a rank in the group with src: the source receives, requests vanish. 4 ranks."""

import pickle
import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def broadcast_requests(requests, my_rank, src, group):
    """First how many bytes, then the bytes."""
    if my_rank == src:
        data = torch.frombuffer(bytearray(pickle.dumps(requests)), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(data)]), src=src, group=group)
        dist.broadcast(data, src=src, group=group)
        return requests
    length = torch.tensor([0])
    dist.broadcast(length, src=src, group=group)
    if length.item() == 0:
        return []
    data = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(data, src=src, group=group)
    return pickle.loads(bytes(data.tolist()))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()  # all are connected: who ends early leaves nobody behind
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    requests = [f"request {rank // 2}"] if rank % 2 == 0 else None
    my_rank = rank if CORRECT else dist.get_rank(group)
    received = broadcast_requests(requests, my_rank, rank // 2 * 2, group)
    assert received == [f"request {rank // 2}"], f"replica {rank // 2} has {received}"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
