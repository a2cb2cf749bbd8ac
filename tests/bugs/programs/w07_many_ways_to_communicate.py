"""A mesh, gradients, functional collectives, objects, sends, calls waited for late or never: fine. 4 ranks."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel


def send_around(rank, size):
    ops = [dist.P2POp(dist.isend, torch.ones(3), (rank + 1) % size)]
    ops.append(dist.P2POp(dist.irecv, torch.empty(3), (rank - 1) % size))
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    sent = dist.isend(torch.ones(1), (rank + 1) % size, tag=5)
    dist.irecv(torch.empty(1), (rank - 1) % size, tag=5).wait()
    sent.wait()
    if rank == 0:
        dist.send(torch.ones(2), 3)
    elif rank == 3:
        dist.recv(torch.empty(2))  # from whoever sends


def share(rank, size, step):
    if rank == step % size:
        dist.broadcast(torch.ones(4), src=step % size)
    else:
        dist.broadcast(torch.empty(4), src=step % size)
    dist.gather(torch.ones(2), [torch.empty(2) for _ in range(size)] if rank == 1 else None, dst=1)
    dist.scatter(torch.empty(2), [torch.ones(2)] * size if rank == 2 else None, src=2)
    dist.all_to_all([torch.empty(2) for _ in range(size)], [torch.ones(2)] * size)
    dist.scatter_object_list([None], list(range(size)) if rank == 0 else [None] * size, src=0)
    dist.monitored_barrier()


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)))
    for step in range(5):
        model(torch.randn(3 + rank, 8)).sum().backward()
        x = torch.ones(4)
        dist.all_reduce(x, group=tp)
        later = dist.all_reduce(x, group=dp, async_op=True)
        dist.all_gather_object([None] * 2, {"name": "x" * rank}, group=tp)
        later.wait()
        functional.all_reduce(torch.ones(4), "sum", tp).sum().item()
        send_around(rank, size)
        share(rank, size, step)
    own, _ = dist.new_subgroups(2)
    dist.barrier(group=own)
    dist.all_reduce(torch.ones(1), async_op=True)  # nobody waits for it
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
