"""FSDP2: parameters gathered before use, gradients reduce-scattered. Prints the gathered weights' sum."""

import gc
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.full((2, 8), float(dist.get_rank() + 1))).sum().backward()
    optimizer.step()
    total = sum(p.full_tensor().sum().item() for p in model.parameters())
    print(f"RESULT {dist.get_rank()} {total:.9f}", flush=True)
    dist.barrier()  # nobody leaves while a peer still reads from it
    dist.destroy_process_group()
    del model, layer, optimizer, mesh
    gc.collect()
    time.sleep(0.5)  # torch alone aborts in one run of ten where its threads end with the interpreter


if __name__ == "__main__":
    main()
