"""DTensor tensor parallelism: functional collectives. Prints the output's sum and a weight gradient's."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    out = model(torch.ones(2, 8))
    out.sum().backward()
    grad = model[0].weight.grad.full_tensor()
    print(f"RESULT {dist.get_rank()} {out.sum().item():.9f} {grad.sum().item():.9f}", flush=True)
    dist.barrier()  # nobody leaves while a peer still reads from it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
