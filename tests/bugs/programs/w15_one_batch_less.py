"""One rank has a batch less: it sums its loss while the others still sum gradients. 4 ranks."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(32, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = torch.zeros(1)
    for _ in range(3 if rank == 1 and not CORRECT else 4):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 32)).square().mean()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    print(f"rank {rank} has {total.item()}")
    del model, optimizer, loss  # before the group that they use
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
