"""Four ranks, TP groups [0,1] and [2,3]; FlashInfer's workspace for [0,1] is made with its group left out.

Its rendezvous then runs over all four, and [2,3], which make none, never come. Without a GPU the same rendezvous is
entered through FlashInfer's own backend, as the first lines of its workspace do. Runs until it is ended.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from flashinfer.comm import create_allreduce_fusion_workspace
from flashinfer.comm.mnnvl import TorchDistBackend


def main() -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("gloo")
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    if rank < 2:
        make_workspace(rank)
    dist.barrier(group=groups[rank // 2])
    time.sleep(600)  # [2,3] would serve now


def make_workspace(tp_rank: int) -> None:
    """For two ranks; nobody says which two."""
    if not torch.cuda.is_available():
        TorchDistBackend().allgather("where my descriptor is")
        return
    create_allreduce_fusion_workspace(
        backend="trtllm", world_size=2, rank=tp_rank, max_token_num=64, hidden_dim=4096, dtype=torch.bfloat16
    )


if __name__ == "__main__":
    main()
