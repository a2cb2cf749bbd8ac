"""Ways of other systems, from a kit: a directory with a module `measure_peers` and whatever that module loads.

The module gives `Bench(gloo_group)` and `load_peers(part, bench, hidden=, max_tokens=, peers=DIRECTORY)`, which returns
{name: op}. An op has `kind` ("sum", "fused", ...), `fits(tokens)`, `input(tokens)` or None for memory where x must be,
`eager`, `graphed`, `after_capture` or None, and call(x, residual, weight, eps, (norm, total)) or call(x, total).
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from workbench.measure.case import EPS, Case, Gives, Inputs, Work
from workbench.trace import Role

PARTS = ("sglang", "flashinfer")
LABELS = {
    "sgl_fused_1": "SGLang fused, one-shot",
    "sgl_fused_2": "SGLang fused, two-shot",
    "sgl+norm": "SGLang all-reduce + norm",
    "sgl_ar": "SGLang sum alone",
    "fi_one": "FlashInfer trtllm one-shot",
    "fi_two": "FlashInfer trtllm two-shot",
}
"""The columns taken from a kit, with their words; further ones it may have are doubles of these or parts."""


class Kit:
    """One part of a kit. Collective to make: every rank. Its objects live as long as the process: peers map them."""

    def __init__(self, directory: Path, part: str, work: Work, gloo: dist.ProcessGroup, *, max_tokens: int) -> None:
        sys.path.insert(0, str(directory))
        with contextlib.redirect_stdout(sys.stderr):  # stdout may be a document
            module = importlib.import_module("measure_peers")
            self._bench = module.Bench(gloo)
            self._ops: dict[str, Any] = module.load_peers(
                part, self._bench, hidden=work.hidden, max_tokens=max_tokens, peers=str(directory)
            )

    def cases(self, inputs: Inputs) -> Iterator[Case]:
        """The columns of LABELS that take so many tokens."""
        tokens = inputs.x.shape[0]
        for name, label in LABELS.items():
            op = self._ops.get(name)
            if op is not None and op.fits(tokens) and op.graphed:
                yield _case(name, label, op, inputs)


def kit_versions(directory: Path) -> list[str]:
    """What the kit says of itself in its file VERSIONS."""
    path = directory / "VERSIONS"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _case(name: str, label: str, op: Any, inputs: Inputs) -> Case:
    """Composed ways update the residual in place, as engines do; one kernel for all writes it elsewhere."""
    x = torch.empty_like(inputs.x) if op.input is None else op.input(inputs.x.shape[0])
    residual, norm, total = (torch.empty_like(inputs.x) for _ in range(3))
    if op.kind == "sum":

        def call() -> tuple[torch.Tensor | None, torch.Tensor | None]:
            return None, op.call(x, total)

    else:
        out = (norm, residual if "+norm" in name else total)

        def call() -> tuple[torch.Tensor | None, torch.Tensor | None]:
            given: tuple[torch.Tensor, torch.Tensor] = op.call(x, residual, inputs.weight, EPS, out)
            return given

    return Case(
        name=name,
        label=label,
        role=Role.PART if op.kind == "sum" else Role.PEER,
        gives=Gives.SUM if op.kind == "sum" else Gives.FUSED,
        x=x,
        residual=residual,
        call=call,
        eager=op.eager,
        after_capture=op.after_capture,
    )
