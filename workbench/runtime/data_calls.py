"""DataCalls: the one way of every data call: whose it is, which workspace, recorded, compared, captured, run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from workbench.backends.base import Workspace
from workbench.documents import show_value
from workbench.errors import (
    ArgumentError,
    CallFailedError,
    CaptureError,
    MismatchError,
    PartialError,
    WorkbenchError,
    name_error,
)
from workbench.ops import FusedOutput, Op, Partial, ReduceOver
from workbench.ranks import GroupMap, product_group
from workbench.runtime.capture import Capture, CapturedCall, NormArguments, foreign_capture
from workbench.runtime.opening import DTYPE_NAMES, HARMLESS
from workbench.runtime.prepared import Prepared
from workbench.runtime.requests import MAX_TOKENS, unprepared_error
from workbench.runtime.subgroup import BoundGroup, limits_of
from workbench.trace import end_after_device

LABEL_LENGTH = 256  # it goes into records, and over the wire in check mode and with captures
_Result = TypeVar("_Result", torch.Tensor, FusedOutput)


class DataCalls:
    """The data calls of one session. `groups` are this rank's, by their rank lists.

    check: compare every call's arguments across its group before it runs.
    broken: a call failed in a way that leaves the session unusable.   capturing: what calls are written to, or None.
    """

    def __init__(
        self,
        group_map: GroupMap,
        groups: Mapping[tuple[int, ...], BoundGroup],
        *,
        world_rank: int,
        device: str,
        check: bool,
    ) -> None:
        self.broken = False
        self.capturing: Capture | None = None
        self._group_map = group_map
        self._groups = groups
        self._world_rank = world_rank
        self._device = device
        self._check = check
        self._ready: dict[tuple[str, torch.dtype, int], tuple[BoundGroup, Prepared]] = {}
        self._owed: dict[ReduceOver, str] = {}

    def bound(self, kind: str) -> BoundGroup:
        """This rank's group of `kind` (or alias). Raises LayoutError if the kind has none."""
        return self._groups[self._group_map.group_of(kind, self._world_rank).world_ranks]

    def forget(self) -> None:
        """Look workspaces up anew: what is prepared has changed."""
        self._ready.clear()

    def call(
        self,
        op: Op,
        x: torch.Tensor | Partial,
        group: str | None,
        label: str,
        norm: NormArguments | None,
        run: Callable[[Workspace, torch.Tensor], _Result],
    ) -> _Result:
        """Run one data call on the workspace that x belongs to; a Partial is settled by it."""
        part, kind = self._whose(x, group)
        if type(label) is not str or len(label) > LABEL_LENGTH:
            raise ArgumentError(f"label={show_value(label)}; allowed: a text of at most {LABEL_LENGTH} characters")
        bound, prepared = self._ready.get((kind, part.dtype, part.shape[-1] if part.dim() else 0)) or self._find(
            kind, part
        )
        if self.capturing is None:
            foreign = foreign_capture(self._device)
            if foreign:
                raise CaptureError(
                    f"{bound.key}: {op.value} on world rank {self._world_rank} inside {foreign}, which this session "
                    f"does not know; capture it in `with session.capture()` on every rank"
                )
        token = None
        try:
            served = prepared.serve(part)
            quant = "" if norm is None or norm[4] is None else "+quant"
            token = bound.lane.begin(
                op.value,
                shape=part.shape,
                dtype=DTYPE_NAMES[part.dtype],
                path=served.plan.choice + quant,
                reduce_op="sum",
                capture=self.capturing is not None,
                note=f"label {label}" if label else "",
            )
            if self._check:
                _compare(bound, _describe(op, part, norm, label, served.plan.choice))
            if self.capturing is None:
                out = run(served.workspace, part)
            else:
                limits = limits_of(bound, prepared.request, MAX_TOKENS if bound.frozen else None)
                call = CapturedCall(bound.key, op, part, norm, label, served.plan.choice + quant)
                out = self.capturing.record(
                    call, limits, lambda: self._replay(bound, op, lambda: run(served.workspace, part))
                )
        except BaseException as e:
            told = self.judge(bound, op.value, e)
            bound.lane.end(token, error=name_error(told))
            if told is e:
                raise
            raise told from e
        if part.is_cuda and self.capturing is None:
            end_after_device(bound.lane, token, part.device)
        else:
            bound.lane.end(token)
        if isinstance(x, Partial):
            x.settle()
        return out

    def judge(self, bound: BoundGroup, what: str, error: BaseException) -> BaseException:
        """What this rank is to raise for `error` of one of its groups. Local; other members that wait are told.

        Errors that are alike on every member before any wait leave the session usable; others end it. An error that
        nobody foresaw becomes the same CallFailedError on every rank that waits for this one, in whatever group.
        """
        if isinstance(error, HARMLESS):
            return error
        self.broken = True
        if self.capturing is not None:  # the ranks meet at its end, and are told there
            return error
        if isinstance(error, Exception) and not isinstance(error, WorkbenchError):
            error = bound.channel.fail(what, error)
        if isinstance(error, CallFailedError):
            for other in self._groups.values():
                other.channel.leave(error)
        return error

    def _replay(self, bound: BoundGroup, op: Op, run: Callable[[], _Result]) -> _Result:
        """One call of a replay."""
        try:
            return run()
        except BaseException as e:
            told = self.judge(bound, op.value, e)
            if told is e:
                raise
            raise told from e

    def _whose(self, x: torch.Tensor | Partial, group: str | None) -> tuple[torch.Tensor, str]:
        """The tensor to reduce and the kind to reduce it over."""
        if not isinstance(x, Partial):
            if not isinstance(x, torch.Tensor):
                raise ArgumentError(f"x is a {type(x).__name__}; allowed: a tensor [tokens, hidden], or a Partial")
            if not isinstance(group, str):
                raise ArgumentError(
                    f"group={show_value(group)}: a plain tensor needs group=KIND, a text; only a Partial says itself "
                    f"over what it is owed"
                )
            return x, group
        kind = self._owed.get(x.owed)
        if kind is None:
            self._owed[x.owed] = kind = product_group(self._group_map, x.owed.kinds, self._world_rank).kind
        if group is not None and self.bound(group).key.world_ranks != self.bound(kind).key.world_ranks:
            mine = self._group_map.group_of(kind, self._world_rank)
            raise PartialError(
                f"{x!r} owes a sum over {mine}, but group={group!r} is "
                f"{self._group_map.group_of(group, self._world_rank)}; leave group out"
            )
        return x.unreduced(), kind

    def _find(self, kind: str, x: torch.Tensor) -> tuple[BoundGroup, Prepared]:
        """What x's dtype and hidden size are prepared with in this rank's group of `kind`; remembered."""
        bound = self.bound(kind)
        hidden = x.shape[-1] if x.dim() else 0
        prepared = bound.prepared.get((x.dtype, hidden))
        if prepared is None:
            raise unprepared_error(bound, x.dtype, hidden)
        self._ready[kind, x.dtype, hidden] = found = (bound, prepared)
        return found


def plain_sum(workspace: Workspace, part: torch.Tensor) -> torch.Tensor:
    """What DataCalls.call runs for an all_reduce."""
    return workspace.all_reduce(part)


def _compare(bound: BoundGroup, mine: str) -> None:
    """Raise MismatchError on every member unless all came with the text `mine`. Collective over the group."""
    told = bound.channel.gather(mine, what="check")
    if any(text != told[0] for text in told):
        story = "; ".join(f"world rank {r}: {text}" for r, text in zip(bound.key.world_ranks, told, strict=True))
        raise MismatchError(f"{bound.key}: members came with different calls: {story}")


def _describe(op: Op, x: torch.Tensor, norm: NormArguments | None, label: str, path: str) -> str:
    """A call in words; members whose calls belong together say the same."""
    text = f"{op.value} (sum), x {_tensor_text(x)}"
    if norm is not None:
        residual, weight, eps, weight_bias, quant = norm
        text += f", residual {_tensor_text(residual)}, weight {_tensor_text(weight)}, eps {eps!r}"
        text += f", weight_bias {weight_bias!r}" + ("" if quant is None else f", {quant}")
    return text + f", on {path}" + (f", label {label!r}" if label else "")


def _tensor_text(x: object) -> str:
    if not isinstance(x, torch.Tensor):
        return f"a {type(x).__name__}"
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} strides {list(x.stride())}"
