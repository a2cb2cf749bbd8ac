"""Paths side by side on every subgroup at once, as the notebooks measure them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from workbench.measure.timing import Variant, alternate
from workbench.measure.unfused import Steps, Unfused
from workbench.runtime import Session
from workbench.trace import Sample

VARIANTS = ("fused", "steps", "unfused", "broadcast")
EPS = 1e-6


def time_subgroups(
    session: Session,
    kinds: Sequence[str],
    *,
    tokens: Sequence[int],
    variants: Sequence[str] = ("fused", "unfused"),
    hidden: int = 4096,
    dtype: torch.dtype = torch.bfloat16,
    rounds: int = 5,
) -> list[Sample]:
    """Times of every group of each kind, for each number of tokens, after a check that the paths agree.

    fused      session.all_reduce_add_rms_norm
    steps      session.all_reduce, an add, torch's RMSNorm: the same transport, so the difference is fusion alone
    unfused    the library's all-reduce (gloo over TCP, or NCCL), an add, torch's RMSNorm: another transport too
    broadcast  torch's broadcast of the same x from the group's first member
    `kind` of a sample is the group itself, such as "tp[0,1]". The variants take turns; the slowest member counts. The
    groups of a kind run at the same time.
    Collective: every rank of the session, all in the kinds; the result is the same on each.
    Raises: ArithmeticError if the fused and the other sums differ by more than roundings; ValueError for an unknown
    variant.
    """
    unknown = sorted(set(variants) - set(VARIANTS))
    if unknown:
        raise ValueError(f"variants={list(variants)} names {unknown[0]!r}; allowed: {', '.join(VARIANTS)}")
    found: list[Sample] = []
    for kind in kinds:
        key = session.group(kind)
        session.prepare(kind, hidden=hidden, dtype=dtype, max_tokens=max(tokens))
        for count in tokens:
            paths = _paths(session, kind, (count, hidden), dtype)
            calls = min(20, int(100 / math.log2(max(key.size, 2))))  # sums of the unfused scratch stay finite
            chosen = {name: paths[name] for name in variants}
            timed = alternate(session, kind, chosen, tokens=count, calls=calls, rounds=rounds)
            found += [replace(sample, kind=str(key)) for sample in timed]
    everyone: list[list[Sample]] = [[] for _ in range(session.group_map.world_size)]
    dist.all_gather_object(everyone, found)
    once = dict.fromkeys(sample for samples in everyone for sample in samples)  # members told the same
    owners = [session.group_map.owner(kind) for kind in kinds]
    return sorted(once, key=lambda sample: owners.index(sample.kind.partition("[")[0]))


def _paths(session: Session, kind: str, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Variant]:
    """(reset, call) by name."""
    seeded = torch.Generator().manual_seed(1 + session.world_rank)
    x = session.empty(shape, dtype, group=kind)
    x.copy_(torch.randn(shape, generator=seeded))
    residual = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(x)
    weight = torch.ones(shape[1], dtype=dtype, device=x.device)
    steps = Steps(session, kind, x, residual, weight, eps=EPS)
    unfused = Unfused(session, kind, x, residual, weight, eps=EPS)

    def fused() -> Any:
        return session.all_reduce_add_rms_norm(x, residual, weight, eps=EPS, group=kind)

    wanted = fused()
    roundings = 4 * session.group(kind).size * torch.finfo(dtype).eps  # the library rounds at each addition
    for name, (_, plain) in {"steps": steps(), "unfused": unfused()}.items():
        if not torch.allclose(wanted.residual.float(), plain.float(), rtol=roundings, atol=roundings):
            raise ArithmeticError(f"{session.group(kind)}: the residuals of fused and {name} differ; nothing is timed")
    unfused.reset()
    root = session.group(kind).world_rank(0)
    sent = x.clone()

    def broadcast() -> None:
        dist.broadcast(sent, src=root, group=session.torch_group(kind))

    return {
        "fused": (_nothing, fused),
        "steps": (_nothing, steps),
        "unfused": (unfused.reset, unfused),
        "broadcast": (_nothing, broadcast),
    }


def _nothing() -> None:
    """The reset of a path that leaves its inputs as they are."""
