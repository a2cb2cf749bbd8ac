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
