"""Story: why ranks go on no more, told once over the store. The first to fail tells; the others raise the same."""

from __future__ import annotations

import json

import torch.distributed as dist

from workbench.errors import CallFailedError, ClosedError, DeadlineError, PeerDeadError, WorkbenchError

_BLAMING: dict[str, tuple[type[WorkbenchError], str]] = {
    "PeerDeadError": (PeerDeadError, "dead"),
    "DeadlineError": (DeadlineError, "missing"),
    "CallFailedError": (CallFailedError, "failed"),
}
BLAMING = tuple(kind for kind, _ in _BLAMING.values())
"""Errors that say which ranks are at fault: every rank raises them as the first one did."""


class Story:
    """One story under `name` in the store, or none yet. Local: neither waits for a rank."""

    def __init__(self, store: dist.Store, name: str) -> None:
        self._store = store
        self._name = name

    def tell(self, error: Exception) -> Exception:
        """Tell why this rank fails, unless another did before; what every rank raises."""
        _, attribute = _BLAMING.get(type(error).__name__, (None, ""))
        told = json.dumps([type(error).__name__, str(error), list(getattr(error, attribute, ()))])
        try:
            return _retold(self._store.compare_set(self._name, "", told))
        except dist.DistError:  # the store ended with its process: nobody is left to tell
            return error

    def read(self) -> Exception | None:
        """What was told, if anything was, and the store is still there."""
        try:
            return _retold(self._store.get(self._name)) if self._store.check([self._name]) else None
        except dist.DistError:
            return None


def _retold(told: bytes) -> Exception:
    name, text, ranks = json.loads(told)
    if name in _BLAMING:
        kind, attribute = _BLAMING[name]
        return kind(text, **{attribute: tuple(ranks)})
    return ClosedError(text) if name == ClosedError.__name__ else WorkbenchError(text)
