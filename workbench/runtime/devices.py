"""Which device a session runs on, and which GPU is a rank's."""

from __future__ import annotations

import os

import torch

from workbench.errors import ArgumentError
from workbench.settings import Settings


def choose_device(asked: str | None, local_ranks: int, settings: Settings | None = None) -> str:
    """`asked`, else WORKBENCH_DEVICE, else cuda where torch finds a GPU for each of `local_ranks`, else cpu.

    Raises: ArgumentError for another word, or for cuda where torch finds no usable GPU. Local.
    """
    settings = Settings.read() if settings is None else settings
    device = asked or settings.device
    if device is None:
        return "cuda" if torch.cuda.device_count() >= local_ranks else "cpu"
    if device not in ("cpu", "cuda"):
        raise ArgumentError(f"device={device!r}; allowed: 'cpu' or 'cuda'")
    if device == "cuda" and torch.cuda.device_count() < 1:
        raise ArgumentError("device='cuda', but torch finds no usable GPU here; use 'cpu'")
    return device


def choose_job_device(
    asked: str | None, ranks: int | None, *, default_ranks: int = 4, may_share: bool = False
) -> tuple[str, int]:
    """Device and number of ranks for a job on this machine.

    Without `ranks`: as many as there are GPUs on cuda, else `default_ranks`. may_share: the job may be told by
    WORKBENCH_SHARE_GPUS to put several ranks on one GPU; one that reports times may not.
    Raises: ArgumentError as choose_device, and for more ranks on cuda than there are GPUs. Local.
    """
    gpus = torch.cuda.device_count()
    device = choose_device(asked, ranks or default_ranks)
    if device == "cpu":
        return device, ranks or default_ranks
    if may_share and Settings.read().share_gpus:
        return device, ranks or max(gpus, 2)
    ranks = ranks or gpus
    if not 2 <= ranks <= gpus:
        share = ", or WORKBENCH_SHARE_GPUS=1 (right results, times that mean nothing)" if may_share else ""
        raise ArgumentError(
            f"{ranks} ranks on cuda need a GPU each and at least two of them; torch finds {gpus}; use --device cpu, or "
            f"2 to {gpus} ranks{share}"
        )
    return device, ranks


def take_gpu(settings: Settings | None = None) -> int:
    """Make this rank's GPU the current device, and give its number: the one that torchrun's LOCAL_RANK counts to.

    With WORKBENCH_SHARE_GPUS the ranks of a host are dealt to its GPUs in turn, so rank and GPU differ in number.
    Local.   Raises: ArgumentError if there is no GPU for this rank.
    """
    settings = Settings.read() if settings is None else settings
    local_rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local_rank >= gpus and not (settings.share_gpus and gpus):
        raise ArgumentError(
            f"LOCAL_RANK={local_rank} has no GPU: torch finds {gpus}; start at most {gpus} ranks a host, or set "
            f"WORKBENCH_SHARE_GPUS=1 to let ranks share a GPU"
        )
    index = local_rank % gpus
    torch.cuda.set_device(index)
    let_nccl_share(settings)
    return index


def let_nccl_share(settings: Settings) -> None:
    """Let this rank use NCCL on a GPU that others use, if the settings do; before its first communicator. Local.

    NCCL refuses two ranks of one host on one GPU. Told that every rank is a host of its own, it takes the network
    between them, which on one machine is loopback: slow, and right.
    """
    if settings.share_gpus:
        os.environ.setdefault("NCCL_HOSTID", f"workbench-rank-{os.environ.get('RANK', '0')}")
        os.environ.setdefault("NCCL_MNNVL_ENABLE", "0")  # such hosts are no NVLink clique
