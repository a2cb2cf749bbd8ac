"""What one member says about its call, in words; and the error for members that came with different calls."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.errors import MismatchError
from workbench.ops import Op
from workbench.ranks import GroupKey


def call_text(op: str, *, tokens: int, hidden: int, dtype: str, eps: float, weight_bias: float) -> str:
    """'all_reduce, 4 tokens of hidden 64, bfloat16', with eps and weight_bias where the op has a norm."""
    text = f"{op}, {tokens} tokens of hidden {hidden}, {dtype}"
    if op == Op.ALL_REDUCE_ADD_RMS_NORM.value:
        text += f", eps {eps:.9g}, weight_bias {weight_bias:.9g}"
    return text


def mismatch_error(key: GroupKey, call_number: int, told: Sequence[tuple[int, str]]) -> MismatchError:
    """The error for (world_rank, call_text) pairs that differ: names the lowest rank and the first that differs."""
    ordered = sorted(told)
    first = ordered[0]
    other = next(pair for pair in ordered if pair[1] != first[1])
    return MismatchError(
        f"{key}: call {call_number}: world rank {first[0]} came with {first[1]} but world rank {other[0]} came with "
        f"{other[1]}; every member must make the same call"
    )
