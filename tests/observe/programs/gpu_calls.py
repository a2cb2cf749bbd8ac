"""NCCL on two GPUs, where a call returns before it is done. With `hang`, world rank 1 leaves out the last sum.

Where there is one GPU, both ranks use it: NCCL takes them for two hosts then, and goes over the network.
"""

import os
import sys
import time

import torch
import torch.distributed as dist


def main():
    gpus = torch.cuda.device_count()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % gpus)
    if gpus == 1:
        os.environ["NCCL_HOSTID"] = os.environ["RANK"]
    dist.init_process_group("nccl")
    x = torch.ones(1024, device="cuda") * (dist.get_rank() + 1)
    for _ in range(3):
        dist.all_reduce(x)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(x)
    graph.replay()
    torch.cuda.synchronize()
    time.sleep(1)
    if "hang" in sys.argv and dist.get_rank() == 1:
        time.sleep(600)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    print(f"RESULT {dist.get_rank()} {x[0].item()}", flush=True)
    if "keep" not in sys.argv:
        graph.reset()  # NCCL does not let go of a communicator that a graph still uses
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
