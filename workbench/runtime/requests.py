"""What a caller asks a group to be prepared for, checked; and the errors for what cannot be."""

from __future__ import annotations

from typing import Any

import torch

from workbench.backends.base import Request
from workbench.documents import show_value
from workbench.errors import ArgumentError
from workbench.ops import DTYPES, Op, Rounding
from workbench.runtime.subgroup import BoundGroup

MAX_HIDDEN = 1 << 20
MAX_TOKENS = 1 << 24
MAX_NAME = 64
MAX_CONCURRENT = 16


def make_request(
    *, hidden: Any, dtype: Any, max_tokens: Any, ops: Any, rounding: Any, backend: Any, concurrent_groups: Any
) -> Request | ArgumentError:
    """The request, or the error to be voted: a bad argument on one rank must be every member's error."""
    try:
        for name, value, limit in (
            ("hidden", hidden, MAX_HIDDEN),
            ("max_tokens", max_tokens, MAX_TOKENS),
            ("concurrent_groups", concurrent_groups, MAX_CONCURRENT),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
                return ArgumentError(f"{name}={show_value(value)}; allowed: a whole number from 1 to {limit}")
        if dtype not in DTYPES:
            names = ", ".join(str(d) for d in DTYPES)
            return ArgumentError(
                f"dtype={dtype if isinstance(dtype, torch.dtype) else show_value(dtype)}; allowed: {names}"
            )
        if backend is not None and (type(backend) is not str or not 0 < len(backend) <= MAX_NAME):
            return ArgumentError(f"backend={show_value(backend)}; allowed: the name of one, as text, or None for any")
        chosen = frozenset(ops)
        if not chosen or not all(isinstance(op, Op) for op in chosen):
            return ArgumentError(f"ops={ops!r}; allowed: members of workbench.ops.Op, at least one")
        return Request(
            hidden=hidden,
            dtype=dtype,
            max_tokens=max_tokens,
            ops=chosen,
            rounding=Rounding(rounding),
            concurrent_groups=concurrent_groups,
        )
    except (TypeError, ValueError) as e:
        return ArgumentError(f"ops={ops!r} rounding={rounding!r}: {e}; allowed: sets of Op; 'once' or 'twice'")


def unprepared_error(bound: BoundGroup, dtype: torch.dtype, hidden: int) -> ArgumentError:
    have = ", ".join(f"{str(d).removeprefix('torch.')} hidden {h}" for d, h in bound.prepared) or "nothing"
    return ArgumentError(
        f"{bound.key}: {str(dtype).removeprefix('torch.')} hidden {hidden} is not prepared (prepared: {have}); call "
        f"prepare({bound.key.kind!r}, hidden={hidden}, dtype={dtype}, max_tokens=...) on every member first"
    )
