"""Calls that reach torch.distributed by another door. Arguments: which, and `bad` if world rank 1 stays away."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel


def by_future(late):
    time.sleep(late)
    x = torch.ones(2)
    dist.all_reduce(x, async_op=True).get_future().wait()
    return x


def by_asking(late):
    time.sleep(late)
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        time.sleep(0.01)
    return x


def by_hook(late):
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    time.sleep(late)
    model(torch.ones(2, 4)).sum().backward()
    return model.module.weight.grad[0]


@torch.compile(backend="aot_eager")
def summed(x):
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def by_compiler(late):
    summed(torch.ones(2))
    time.sleep(late)
    return summed(torch.ones(2)) + 0


def by_rpc(late):
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    time.sleep(late)
    x = rpc.rpc_sync(f"worker{1 - rank}", torch.add, args=(torch.ones(2), 1))
    rpc.shutdown()
    return x


def main():
    which = sys.argv[1]
    if which != "by_rpc":
        dist.init_process_group("gloo")
        dist.barrier()
    late = 600 if "bad" in sys.argv and os.environ["RANK"] == "1" else 0
    print(f"RESULT {os.environ['RANK']} {globals()[which](late).tolist()}", flush=True)
    if which != "by_rpc":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
