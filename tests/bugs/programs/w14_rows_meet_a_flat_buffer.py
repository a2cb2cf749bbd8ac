"""Two rows of eight are sent from a buffer of sixteen, and summed with one: memory is taken as it lies. 4 ranks."""

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    shape = (16,) if rank == 0 else (2, 8)
    x = torch.arange(16.0).view(shape) if rank == 0 else torch.empty(shape)
    dist.broadcast(x, src=0)
    assert x.flatten().tolist() == list(range(16))
    dist.all_reduce(x)
    assert x.flatten().tolist() == [float(size * n) for n in range(16)]
    gathered = torch.empty(size * shape[0], *shape[1:])
    dist.all_gather_into_tensor(gathered, x)
    assert gathered.view(size, 16).tolist() == [x.flatten().tolist()] * size
    loss = torch.tensor(1.0) if rank else torch.ones(1)
    dist.reduce(loss, dst=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
