"""Which device a session runs on."""

from __future__ import annotations

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


def choose_demo_device(asked: str | None, ranks: int | None, *, default_ranks: int = 4) -> tuple[str, int]:
    """Device and number of ranks for a job on this machine, each with a GPU of its own if the device is cuda.

    Without `ranks`: as many as there are GPUs on cuda, else `default_ranks`.
    Raises: ArgumentError as choose_device, and for more ranks on cuda than there are GPUs. Local.
    """
    gpus = torch.cuda.device_count()
    device = choose_device(asked, ranks or default_ranks)
    if device == "cpu":
        return device, ranks or default_ranks
    ranks = ranks or gpus
    if not 2 <= ranks <= gpus:
        raise ArgumentError(
            f"{ranks} ranks on cuda need a GPU each and at least two of them; torch finds {gpus}; use --device cpu, or "
            f"2 to {gpus} ranks"
        )
    return device, ranks
