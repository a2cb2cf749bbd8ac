"""The demo's correctness check: whole numbers must be exact, random numbers bit-equal to the reference."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from workbench.ops import FusedOutput, reference_all_reduce_add_rms_norm
from workbench.ranks import GroupKey
from workbench.runtime import Session

EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Inputs:
    """One member's tensors and every member's contributions in group_rank order (each can be made anywhere)."""

    x: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor
    contributions: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Check:
    """What the check found on one group: equal on every member.

    exact      whole-number sums came out exact
    bit_equal  residual bits equal on all members and equal to the reference
    max_error  largest |norm - fp64 norm| / max(|fp64 norm|, 1) over members and elements
    limit      the most max_error may be: the distance from 1 to the next number of the dtype
    """

    exact: bool
    bit_equal: bool
    max_error: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.exact and self.bit_equal and self.max_error <= self.limit


def make_inputs(
    key: GroupKey, world_rank: int, *, tokens: int, hidden: int, dtype: torch.dtype, device: torch.device, seed: int
) -> Inputs:
    """Random inputs that depend on the world rank, so that a sum over the wrong group shows."""
    contributions = [_random((tokens, hidden), seed + 1000 * r, dtype) for r in key.world_ranks]
    residual = _random((tokens, hidden), seed + 7, dtype)
    weight = _random((hidden,), seed + 8, dtype)
    return Inputs(
        contributions[key.group_rank(world_rank)].to(device), residual.to(device), weight.to(device), contributions
    )


def check_group(session: Session, kind: str, *, tokens: int, hidden: int, dtype: torch.dtype, seed: int) -> Check:
    """Run the fused operation on whole and on random numbers. Collective over the group of `kind`."""
    key = session.group(kind)
    device = torch.device(session.device)
    exact = _whole_numbers_exact(session, kind, tokens, hidden, dtype, device)
    inputs = make_inputs(key, session.world_rank, tokens=tokens, hidden=hidden, dtype=dtype, device=device, seed=seed)
    out = session.all_reduce_add_rms_norm(inputs.x, inputs.residual, inputs.weight, eps=EPS, group=kind)
    wanted = reference_all_reduce_add_rms_norm(
        inputs.contributions, inputs.residual.cpu(), inputs.weight.cpu(), eps=EPS
    )
    mine = {
        "exact": exact,
        "right": torch.equal(_bits(out.residual), _bits(wanted.residual)),
        "digest": hashlib.sha256(_bits(out.residual).numpy().tobytes()).hexdigest(),
        "error": _norm_error(out, inputs),
    }
    found = session.gather_object(mine, group=kind)
    return Check(
        exact=all(f["exact"] for f in found),
        bit_equal=all(f["right"] for f in found) and len({f["digest"] for f in found}) == 1,
        max_error=max(f["error"] for f in found),
        limit=torch.finfo(dtype).eps,
    )


def check_capture(session: Session, kind: str, *, hidden: int, dtype: torch.dtype) -> bool:
    """Capture one fused call, replay it twice on other inputs; True if both replays are exact on every member.

    Collective: every rank of the session.
    """
    device = torch.device(session.device)
    key = session.group(kind)
    x = torch.zeros(1, hidden, dtype=dtype, device=device)
    residual, weight = torch.full_like(x, 5), torch.ones(hidden, dtype=dtype, device=device)
    with session.capture() as capture:
        out = session.all_reduce_add_rms_norm(x, residual, weight, eps=EPS, group=kind)
    exact = True
    for scale in (1, 2):
        x.fill_(scale * 2.0 ** (key.group_rank(session.world_rank) % 4))
        capture.replay()
        total = torch.tensor(scale * sum(2.0 ** (g % 4) for g in range(key.size)) + 5, dtype=dtype, device=device)
        exact = exact and bool((out.residual == total).all())
    return all(session.gather_object(exact, group=kind))


def _whole_numbers_exact(
    session: Session, kind: str, tokens: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Member number g contributes 2^(g mod 7), the residual is 5: every rank's part is told apart, no bit is lost."""
    key = session.group(kind)
    mine = 2.0 ** (key.group_rank(session.world_rank) % 7)
    total = torch.tensor(sum(2.0 ** (g % 7) for g in range(key.size)) + 5, dtype=dtype, device=device)
    x = torch.full((tokens, hidden), mine, dtype=dtype, device=device)
    residual = torch.full_like(x, 5)
    weight = torch.ones(hidden, dtype=dtype, device=device)
    out = session.all_reduce_add_rms_norm(x, residual, weight, eps=EPS, group=kind)
    return bool((out.residual == total).all()) and bool(torch.isfinite(out.norm).all())


def _norm_error(out: FusedOutput, inputs: Inputs) -> float:
    """Largest error of the norm against fp64 arithmetic on the same residual, relative from 1 up."""
    if out.norm.numel() == 0:
        return 0.0
    rows = out.residual.cpu().double()
    wanted = rows * torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + EPS) * inputs.weight.cpu().double()
    return float(((out.norm.cpu().double() - wanted).abs() / wanted.abs().clamp(min=1)).max())


def _random(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)
