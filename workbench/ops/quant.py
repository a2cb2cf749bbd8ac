"""Quantised norms: what `quant=` of the fused operation means, in plain torch. Any device, no process group.

n       = fp32(norm_out)                                   the rounded norm, as the caller gets it
scale   = the caller's                                     "fp8": one for the whole tensor
        = max(max|n| / top, 1 / (512 * top))               "fp8_token", "int8_token": of each token
                                                           "fp8_group": of each `group` neighbours of a token
quant   = Q(clamp(n * (1 / scale), -top, top))             1 / scale and the product are rounded to fp32

top is 448 for fp8 (e4m3, without infinities) and 127 for int8; Q rounds to nearest even. So n is about quant * scale.
The floor of the scale keeps a row of zeros at zero. A NaN or an infinity spoils what shares its scale, visibly: a
dynamic scale is then NaN or infinite, and the NaNs of fp8 are one bit pattern; int8 has no NaN, and holds 0 there. With
a given scale an infinity saturates. Scales have equal bits on every member, since the norms have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch

from workbench.errors import ArgumentError
from workbench.ops.reference import round_to


class QuantKind(Enum):
    """fp8: e4m3, one given scale.   fp8_token, int8_token: a scale a token.   fp8_group: a scale a group of a token."""

    FP8 = "fp8"
    FP8_TOKEN = "fp8_token"
    FP8_GROUP = "fp8_group"
    INT8_TOKEN = "int8_token"

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self is QuantKind.INT8_TOKEN else torch.float8_e4m3fn

    @property
    def top(self) -> float:
        """The largest finite value."""
        return 127.0 if self is QuantKind.INT8_TOKEN else 448.0


@dataclass(frozen=True, slots=True)
class Quant:
    """How the norm is to be quantised. `kind` may be given as text.

    scale: of "fp8" alone, a positive number: what a quantised 1 stands for.   group: of "fp8_group" alone, how many
    neighbouring elements share a scale; 128 if it is left out.
    Raises: ArgumentError for another kind, and for a scale or group that the kind does not have, or lacks.
    """

    kind: QuantKind | str
    scale: float | None = None
    group: int | None = None

    def __post_init__(self) -> None:
        known = [k.value for k in QuantKind]
        if not isinstance(self.kind, QuantKind) and self.kind not in known:
            raise ArgumentError(f"Quant(kind={self.kind!r}); allowed: {', '.join(known)}")
        object.__setattr__(self, "kind", QuantKind(self.kind))
        if (self.scale is not None) != (self.kind is QuantKind.FP8):
            raise ArgumentError(f"{self}: a scale belongs to kind 'fp8', which needs one, and to no other")
        if self.scale is not None and not _is_positive(self.scale):
            raise ArgumentError(f"{self}: allowed: a scale whose fp32 value and its reciprocal are positive and finite")
        if self.kind is QuantKind.FP8_GROUP and self.group is None:
            object.__setattr__(self, "group", 128)
        if (self.group is not None) != (self.kind is QuantKind.FP8_GROUP):
            raise ArgumentError(f"{self}: a group belongs to kind 'fp8_group', and to no other")
        if self.group is not None and (type(self.group) is not int or self.group < 1):
            raise ArgumentError(f"{self}: allowed: a whole number of elements from 1 on")

    def __str__(self) -> str:
        kind = self.kind.value if isinstance(self.kind, QuantKind) else self.kind
        scale = "" if self.scale is None else f", scale={self.scale!r}"
        group = "" if self.group is None else f", group={self.group!r}"
        return f"Quant({kind!r}{scale}{group})"


def check_quant(quant: object, hidden: int) -> None:
    """Raise ArgumentError unless `quant` is a Quant that fits rows of `hidden` elements. Local."""
    if not isinstance(quant, Quant):
        raise ArgumentError(f"quant is a {type(quant).__name__}; allowed: a Quant, such as Quant('fp8_token'), or None")
    if quant.group is not None and hidden % quant.group:
        raise ArgumentError(f"{quant}: {hidden} elements a token are no whole number of groups")


def quantise(norm: torch.Tensor, quant: Quant) -> tuple[torch.Tensor, torch.Tensor]:
    """The quantised rows and their scales.

    Shapes: norm [tokens, hidden], as the fused operation gives it; returns quant [tokens, hidden] in e4m3 or int8, and
        scale in fp32: [1] for "fp8", [tokens, 1] a token, [tokens, hidden / group] a group. 0 tokens is legal.
    Numerics: the formula of this file.   Capture: safe.
    Source: own; the form and the floor of the scales are those that FlashInfer 0.7.2 documents for its dynamic fp8;
        pinned by tests/ops/test_quant.py.
    """
    kind = QuantKind(quant.kind)
    tokens, hidden = norm.shape
    width = quant.group or hidden
    rows = norm.float().view(tokens, hidden // width, width)
    if quant.scale is not None:
        scale = torch.full((1, 1), quant.scale, dtype=torch.float32, device=norm.device)
    else:
        top = torch.full((), kind.top, device=norm.device)  # by a plain number, CUDA multiplies by its rounded inverse
        scale = (rows.abs().amax(dim=-1) / top).clamp(min=1 / (512 * kind.top))
    scaled = (rows * scale.reciprocal().unsqueeze(-1)).clamp(-kind.top, kind.top).view(tokens, hidden)
    scale = scale.view(1) if quant.scale is not None else round_to(scale, torch.float32)
    if kind is QuantKind.INT8_TOKEN:
        return scaled.round().nan_to_num(nan=0.0).to(torch.int8), scale
    nan = torch.full((), 0x7F, dtype=torch.uint8, device=norm.device)
    bits = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(scaled.isnan(), nan, bits).view(torch.float8_e4m3fn), scale


def _is_positive(scale: object) -> bool:
    """A positive number that fp32 and its reciprocal hold."""
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        return False
    return 2.0**-126 <= scale <= 2.0**126
