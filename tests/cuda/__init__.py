"""Tests that need GPUs: two, or one that two ranks may share (WORKBENCH_SHARE_GPUS=1)."""

import torch

from workbench.settings import Settings

HAS_GPUS = torch.cuda.device_count() >= (1 if Settings.read().share_gpus else 2)  # type: ignore[no-untyped-call]
WHY_NOT = "needs two GPUs, or one and WORKBENCH_SHARE_GPUS=1"
