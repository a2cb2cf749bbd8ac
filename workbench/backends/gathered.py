"""GatheredWorkspace: fetch every member's tensor over the group's gloo group, then compute locally in torch.

Two backends stand on it: `reference` and `gloo`. Before data moves, members tell each other through the channel what
they are about to do: a missing member is named, and members that came with different calls get an error instead of the
crash, hang or silent nonsense that gloo makes of unequal sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from workbench.backends.base import Channel, Request, limits_of
from workbench.backends.calls import call_text, mismatch_error
from workbench.backends.forks import refuse_in_children
from workbench.backends.vote import vote
from workbench.errors import ClosedError, DeadlineError, ResourceError, WorkbenchError
from workbench.ops import FusedOutput, Op, Rounding, check_all_reduce, check_empty, check_fused

LOOK_EVERY_S = 0.25  # whether a member has left, while data moves
_COMPARING = "comparing calls"


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The local part: both take every member's x, in group_rank order."""

    all_reduce: Callable[[list[torch.Tensor]], torch.Tensor]
    all_reduce_add_rms_norm: Callable[
        [list[torch.Tensor], torch.Tensor, torch.Tensor, float, float, Rounding], FusedOutput
    ]


class GatheredWorkspace:
    """See backends.base.Workspace. Results are those of `arithmetic`; tensors from `empty` are ordinary memory."""

    size_bytes = 0

    def __init__(self, backend: str, channel: Channel, request: Request, arithmetic: Arithmetic) -> None:
        """Collective: every member of the channel's group."""
        self.backend = backend
        self.request = request
        self._channel = channel
        self._arithmetic = arithmetic
        self._limits = limits_of(channel, request, "cpu")
        self._story = ""
        self._num_calls = 0
        self._places = _places(channel)
        refuse_in_children(self)

    @property
    def broken(self) -> str:
        """Why this workspace serves no more, or ''."""
        return self._story

    def refuse(self, reason: str) -> None:
        """Serve no more, for this reason. Local."""
        self._story = self._story or f"{self._limits.who()}: {reason}"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the group, fp32 in group_rank order, rounded once."""
        self._require_open()
        tokens = check_all_reduce(self._limits, x)
        return self._arithmetic.all_reduce(self._fetch(Op.ALL_REDUCE, x, tokens, 0.0, 0.0))

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float, weight_bias: float
    ) -> FusedOutput:
        """The sum over the group plus residual, and its RMS norm."""
        self._require_open()
        tokens = check_fused(self._limits, x, residual, weight, eps, weight_bias)
        contributions = self._fetch(Op.ALL_REDUCE_ADD_RMS_NORM, x, tokens, eps, weight_bias)
        return self._arithmetic.all_reduce_add_rms_norm(
            contributions, residual, weight, eps, weight_bias, self.request.rounding
        )

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor. Local."""
        self._require_open()
        check_empty(self._limits, shape, dtype)
        return torch.empty(shape, dtype=dtype, device="cpu")

    def close(self) -> None:
        """Refuse further calls. Local; there is nothing to free. May be called twice."""
        self.refuse("the workspace is closed; prepare the group again")

    def _require_open(self) -> None:
        if self._story:
            raise ClosedError(self._story)

    def _fetch(self, op: Op, x: torch.Tensor, tokens: int, eps: float, weight_bias: float) -> list[torch.Tensor]:
        size = self._channel.key.size
        if size == 1:
            return [x]
        with self._channel.busy:
            self._num_calls += 1
            try:
                self._match(op, tokens, eps, weight_bias)
                return _all_gather(self._channel, self._places, x, self._num_calls) if tokens else [x] * size
            except BaseException as e:
                cause = str(e) if isinstance(e, WorkbenchError) else type(e).__name__
                self.refuse(f"the workspace is broken by an earlier failure: {cause}; rebuild it")
                raise

    def _match(self, op: Op, tokens: int, eps: float, weight_bias: float) -> None:
        dtype = str(self.request.dtype).removeprefix("torch.")
        mine = call_text(
            op.value, tokens=tokens, hidden=self.request.hidden, dtype=dtype, eps=eps, weight_bias=weight_bias
        )
        told = self._channel.gather([self._num_calls, mine], what=_COMPARING, held=True)
        if any(answer != told[0] for answer in told):
            texts = [text if n == self._num_calls else f"{text} (its call {n})" for n, text in told]
            raise mismatch_error(
                self._channel.key,
                self._num_calls,
                list(zip(self._channel.key.world_ranks, texts, strict=True)),
            )


def _places(channel: Channel) -> list[int]:
    """For each member in group_rank order its place in torch's group, asked of torch and not assumed."""
    if channel.key.size == 1:
        return [0]

    def ask() -> int:
        return dist.get_rank(channel.torch_group)

    return [int(place) for place in vote(channel, "asking torch for its numbering", ask)]


def _all_gather(channel: Channel, places: list[int], x: torch.Tensor, call_number: int) -> list[torch.Tensor]:
    """Every member's x in group_rank order. Polls, so that Ctrl-C comes through, with the channel's deadline.

    Where the data does not come, one exchange over the channel, with its own deadline, finds out who is missing.
    """
    received = [torch.empty_like(x) for _ in places]
    try:
        work = dist.all_gather(received, x, group=channel.torch_group, async_op=True)
        deadline = time.monotonic() + channel.timeout_s
        looked, pause_s = time.monotonic(), 20e-6
        while not work.is_completed():
            if time.monotonic() > looked + LOOK_EVERY_S:
                looked = time.monotonic()
                if (story := channel.story()) is not None:
                    raise story
            if time.monotonic() > deadline:
                _require_all_there(channel, call_number, "a deadline")
                raise DeadlineError(
                    f"{channel.key}: call {call_number}: the data did not come within {channel.timeout_s:g} s though "
                    f"every member entered the call and still answers, so gloo itself does not move; look at the "
                    f"network between them, or raise timeout_s"
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.3, 0.005)
        work.wait()
    except RuntimeError as e:
        _require_all_there(channel, call_number, "a failure of gloo")
        raise ResourceError(f"{channel.key}: gloo failed though every member is there: {e}") from e
    return [received[place] for place in places]


def _require_all_there(channel: Channel, call_number: int, trouble: str) -> None:
    """Raise what the channel says of members that are dead or missing, alike on every rank; return if all answer.

    A member whose call did end meets this in its next call, as a call that differs.
    """
    channel.gather([call_number, f"{trouble} while data moved"], what=_COMPARING, held=True)
