"""What fusing buys on GPUs: measured where there are two or more, else the record of a machine that had them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from workbench.bench.run import run_comparison
from workbench.measure import FusedSpec
from workbench.trace import Comparison, parse_comparison

_RECORD = Path(__file__).with_name("recorded") / "h200x2-h7168.json"
_TOKENS = (1, 8, 64, 256, 1024, 4096)


def gpu_comparison(
    *, hidden: int = 7168, tokens: tuple[int, ...] = _TOKENS, say: Callable[[str], None] = print
) -> tuple[str, Comparison]:
    """The fused op beside every peer that runs here, a rank a GPU, and its label: "measured here" or "recorded ...".

    With fewer than two GPUs it is the record of two H200, hidden 7168, whatever sizes were asked.
    Local: starts ranks of its own, beside those of a cluster. About half a minute on GPUs.
    Raises: MeasureError if the job on the GPUs fails.
    """
    gpus = torch.cuda.device_count()
    if gpus < 2:
        record = parse_comparison(_RECORD.read_text(encoding="utf-8"), _RECORD.name)
        say(f"this machine has {gpus} GPUs, so this was recorded on {record.ranks} x {record.device}")
        return f"recorded {str(record.about['date'])[:10]}", record
    spec = FusedSpec(device="cuda", ranks=min(gpus, 16), hidden=hidden, tokens=tokens, rounds=20)
    return "measured here", run_comparison(spec, out=None, progress=say)
