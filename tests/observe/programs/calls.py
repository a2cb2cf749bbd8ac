"""Every way of calling that the recording tells apart, once. Two ranks."""

from datetime import timedelta

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    group = dist.new_group([1, 0], timeout=timedelta(seconds=50))
    alone = dist.new_group([1])
    x = torch.full((2, 3), float(rank + 1))
    dist.all_reduce(x)
    dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    dist.broadcast(x, src=1, group=group)
    dist.broadcast(x, group_src=0, group=group)
    dist.broadcast_object_list([rank], src=0, group=group)
    work = dist.all_reduce(x, async_op=True, group=group)
    work.wait()
    if rank == 0:
        dist.send(x, 1)
        requests = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1), dist.P2POp(dist.irecv, x.clone(), 1)])
    else:
        dist.recv(x, 0)
        requests = dist.batch_isend_irecv([dist.P2POp(dist.irecv, x.clone(), 0), dist.P2POp(dist.isend, x, 0)])
    for request in requests:
        request.wait()
    dist.all_gather([torch.empty(3, 2), torch.empty(3, 2)], x.t().contiguous(), group=group)
    if rank == 0:
        dist.all_reduce(x, group=alone)  # not a member: torch warns and does nothing
    gathered = torch.empty(4, 3)
    dist.all_gather_into_tensor(gathered, x, group=group)
    dist.reduce_scatter_tensor(torch.empty(1, 3), x, group=group)
    dist.barrier()
    dist.destroy_process_group()
    print(f"RESULT {rank} {x.sum().item()} {gathered.sum().item()}", flush=True)


if __name__ == "__main__":
    main()
