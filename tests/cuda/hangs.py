"""Two hangs for `workbench trace`: rank 1 stays away from the second call, of the library or of our own kernel.

workbench trace --deadline 5 -- torchrun --nproc-per-node 2 tests/cuda/hangs.py [library|kernel] [cuda|cpu]
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from workbench import GroupMap, Session
from workbench.runtime.devices import take_gpu


def library(device: str) -> None:
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    x = torch.ones(1024, device=device)
    dist.all_reduce(x)
    if dist.get_rank() == 0:
        dist.all_reduce(x)
        print(x[0].item())  # the wait for the device
    else:
        time.sleep(100)


def kernel(device: str) -> None:
    with Session(GroupMap.build("sglang", tp=2), device=device, timeout_s=60) as s:
        s.prepare("tp", hidden=7168, dtype=torch.bfloat16, max_tokens=8)
        x = torch.ones(8, 7168, dtype=torch.bfloat16, device=device)
        s.all_reduce(x, group="tp")
        if s.world_rank == 0:
            total = s.all_reduce(x, group="tp")
            print(total[0, 0].item())
        else:
            time.sleep(100)


if __name__ == "__main__":
    which, device = (sys.argv[1:] + ["library", "cuda"][len(sys.argv) - 1 :])[:2]
    if device == "cuda":
        take_gpu()
    {"library": library, "kernel": kernel}[which](device)
