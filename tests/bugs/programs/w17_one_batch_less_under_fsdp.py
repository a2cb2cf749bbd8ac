"""A rank has a batch less and gathers the weights while the other one still makes a step of FSDP. 2 ranks."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3 if rank == 1 and not CORRECT else 4):
        loss = model(torch.ones(4, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    norm = sum(p.full_tensor().square().sum().item() for p in model.parameters())
    print(f"rank {rank} has {norm}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
