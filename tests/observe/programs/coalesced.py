"""Sums that torch coalesces, waited for inside and outside their manager, then a ring of batched sends and receives.

Arguments: nccl, for GPUs; and last what world rank 1 stays away from or leaves out: sums, async, send.
Where there is one GPU, all ranks use it: NCCL takes them for as many hosts then, and goes over the network.
"""

import os
import sys
import time

import torch
import torch.distributed as dist


def main():
    nccl = "nccl" in sys.argv
    if nccl:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        if torch.cuda.device_count() == 1:
            os.environ["NCCL_HOSTID"] = os.environ["RANK"]
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    dist.init_process_group("nccl" if nccl else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    late = sys.argv[-1] if rank == 1 else ""
    xs = [torch.full((2 + i,), float(rank), device=device) for i in range(2)]
    dist.all_reduce(xs[0])
    torch.cuda.synchronize() if nccl else None
    if late == "sums":
        time.sleep(600)
    with dist.distributed_c10d._coalescing_manager(device=device if nccl else None):
        for x in xs:
            dist.all_reduce(x)
    if late == "async":
        time.sleep(600)
    with dist.distributed_c10d._coalescing_manager(device=device if nccl else None, async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    got = torch.zeros(2, device=device)
    ops = [dist.P2POp(dist.irecv, got, (rank - 1) % size), dist.P2POp(dist.isend, xs[0], (rank + 1) % size)]
    for work in dist.batch_isend_irecv(ops[:1] if late == "send" else ops):
        work.wait()
    torch.cuda.synchronize() if nccl else None
    if late == "send":
        time.sleep(600)
    print(f"RESULT {rank} {xs[0].tolist()} {got.tolist()}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
