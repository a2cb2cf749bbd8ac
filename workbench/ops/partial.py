"""Partial: a tensor that still owes a sum, with the group that owes it. Who reduces travels with the tensor, as a type.

Upstream engines hand this on as an attribute of the tensor, which any op that makes a new tensor loses, and which does
not say over which group (see tests/ops/test_partial.py).
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from workbench.errors import PartialError


class ReduceOver:
    """The kinds over which a sum is still owed: one kind, or several whose product is one group (EP x MoE-TP)."""

    __slots__ = ("kinds",)

    def __init__(self, *kinds: str) -> None:
        if not kinds or not all(isinstance(k, str) and k for k in kinds) or len(set(kinds)) != len(kinds):
            raise PartialError(f"ReduceOver{kinds!r}; allowed: one or more different kinds, such as ReduceOver('tp')")
        self.kinds = kinds

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReduceOver) and frozenset(self.kinds) == frozenset(other.kinds)

    def __hash__(self) -> int:
        return hash(frozenset(self.kinds))

    def __repr__(self) -> str:
        return f"ReduceOver({', '.join(map(repr, self.kinds))})"


class Partial:
    """`tensor` [tokens, hidden], each member's part of a sum over `owed`.

    Only Session.all_reduce and all_reduce_add_rms_norm give back a plain tensor, once. Adding, normalising or any other
    torch function on a Partial raises PartialError that names what is owed.
    """

    __slots__ = ("_tensor", "owed")

    def __init__(self, tensor: torch.Tensor, owed: ReduceOver) -> None:
        if not isinstance(tensor, torch.Tensor) or not isinstance(owed, ReduceOver):
            raise PartialError(
                f"Partial({type(tensor).__name__}, {owed!r}); allowed: Partial(tensor, owed=ReduceOver(kind, ...))"
            )
        self._tensor: torch.Tensor | None = tensor
        self.owed = owed

    @property
    def shape(self) -> torch.Size:
        return self.unreduced().shape

    @property
    def dtype(self) -> torch.dtype:
        return self.unreduced().dtype

    def settle(self) -> None:
        """The sum has been taken: a second reduce raises PartialError. For the runtime."""
        self.unreduced()
        self._tensor = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Every torch function that meets a Partial ends here."""
        met = next(a for a in (*args, *(kwargs or {}).values()) if isinstance(a, Partial))
        raise met._refuse(getattr(func, "__name__", str(func)))

    def __add__(self, other: object) -> NoReturn:
        raise self._refuse("add")

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = __add__

    def __repr__(self) -> str:
        state = "settled" if self._tensor is None else f"{list(self._tensor.shape)} {self._tensor.dtype}"
        return f"Partial({state}, owed={self.owed!r})"

    def unreduced(self) -> torch.Tensor:
        """This member's part, for the runtime that is about to reduce it. Raises PartialError once it is settled."""
        if self._tensor is None:
            raise PartialError(
                f"this Partial was reduced over {self._kinds()} already; a second reduce would double it"
            )
        return self._tensor

    def _refuse(self, what: str) -> PartialError:
        return PartialError(
            f"{what} on a Partial that still owes a sum over {self._kinds()}; reduce it first: pass it to "
            f"Session.all_reduce or all_reduce_add_rms_norm"
        )

    def _kinds(self) -> str:
        return " x ".join(self.owed.kinds)
