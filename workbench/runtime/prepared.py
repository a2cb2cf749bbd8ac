"""Prepared: what a group was set up with for one dtype and hidden size. It finds the workspace of each call by size."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch

from workbench.backends.base import Request, Workspace
from workbench.plan import Plan
from workbench.trace import Lane

_log = logging.getLogger("workbench")


@dataclass(frozen=True, slots=True)
class Part:
    """A workspace and the plan that it serves: calls of more tokens than the part before, up to its capacity."""

    plan: Plan
    workspace: Workspace


class Prepared:
    """Parts by ascending capacity. Members come with equal numbers of tokens, so they take the same part.

    asked: the backend that the caller named, or None.   tells: after `freeze`, the first call that is too large is
    told in a line of the log, and their number at the end; one member's word is enough for a group.
    """

    def __init__(
        self, request: Request, parts: tuple[Part, ...], *, asked: str | None, group: str, lane: Lane, tells: bool
    ) -> None:
        self.request = request
        self.parts = parts
        self.asked = asked
        self.fallback: Part | None = None
        self.num_fallbacks = 0
        self._group = group
        self._lane = lane
        self._tells = tells

    def arguments(self) -> dict[str, Any]:
        """What `Session.prepare` was called with, but for the kind."""
        names = ("hidden", "dtype", "max_tokens", "ops", "rounding", "concurrent_groups")
        return {"backend": self.asked, **{name: getattr(self.request, name) for name in names}}

    @property
    def broken(self) -> str:
        """Why a part serves no more, or ''. Local; see backends.base.Workspace.broken."""
        parts = (*self.parts, self.fallback) if self.fallback is not None else self.parts
        return next((part.workspace.broken for part in parts if part.workspace.broken), "")

    def find(self, tokens: int) -> Part:
        """The part for so many tokens; the last one for more than any holds, which refuses them."""
        return next((part for part in self.parts if tokens <= part.plan.capacity_tokens), self.parts[-1])

    def serve(self, x: object) -> Part:
        """The part for a call with x. What is no batch of rows goes to the first part, which refuses it.

        After `freeze`, more tokens than any part holds take the fallback, over the same group, and leave an event.
        """
        tokens = x.shape[0] if isinstance(x, torch.Tensor) and x.dim() == 2 else 0
        if self.fallback is None or tokens <= self.request.max_tokens:
            return self.parts[0] if len(self.parts) == 1 else self.find(tokens)
        self.num_fallbacks += 1
        last = self.parts[-1].workspace.backend
        path = self.fallback.plan.choice
        note = (
            f"{self._group}: {tokens} tokens exceed the {self.request.max_tokens} of the frozen {last} workspace; "
            f"{path} reduces over the same group, then adds and normalises"
        )
        self._lane.instant("fallback", path=path, note=note)
        if self._tells and self.num_fallbacks == 1:
            _log.warning("%s (told once)", note)
        return self.fallback

    def plan(self, tokens: int | None) -> Plan:
        """The plan as it reads for so many tokens; without a number, for as many as were prepared."""
        prepared = self.request.max_tokens
        if tokens is None or tokens <= prepared:
            return self.find(prepared if tokens is None else tokens).plan
        if self.fallback is None:
            return replace(
                self.parts[-1].plan,
                choice="none",
                reason=f"{tokens} tokens exceed the {prepared} prepared",
                fallback="",
            )
        reason = f"{tokens} tokens exceed the {prepared} of the frozen workspace"
        return replace(self.parts[-1].plan, choice=self.fallback.plan.choice, reason=reason, fallback="")

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the workspace that serves so many tokens. Local."""
        return self.find(shape[0] if len(shape) == 2 else self.request.max_tokens).workspace.empty(shape, dtype)

    def check(self) -> None:
        """Raise what a kernel reported. Local: paths that wait on the host have nothing to report later."""
        for part in self.parts:
            look = getattr(part.workspace, "check", None)
            if look is not None:
                look()

    def close(self) -> None:
        """Close every workspace, and tell how many calls took the fallback if it was more than the one told. Local."""
        if self.fallback is not None:
            self.fallback.workspace.close()
            if self._tells and self.num_fallbacks > 1:
                _log.warning("%s: %d calls in all took the fallback", self._group, self.num_fallbacks)
        for part in reversed(self.parts):
            part.workspace.close()
