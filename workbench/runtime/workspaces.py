"""The workspace behind a session's calls, for timing kernels: without the session's records and its own captures."""

from __future__ import annotations

import torch

from workbench.backends.base import Workspace
from workbench.errors import ArgumentError
from workbench.runtime.session import Session


def find_workspace(session: Session, kind: str, *, hidden: int, dtype: torch.dtype, tokens: int) -> Workspace:
    """What serves calls of so many tokens on this rank's group of `kind`. Local; it lives as long as it is prepared.

    Its calls may stand in any CUDA graph. Ranks must make them alike: nobody compares what they captured.
    Raises: ArgumentError if nothing was prepared for this dtype and hidden size.
    """
    bound = session._calls.bound(kind)
    prepared = bound.prepared.get((dtype, hidden))
    if prepared is None:
        raise ArgumentError(f"{bound.key}: {dtype}, hidden {hidden} is not prepared; call prepare({kind!r}, ...) first")
    return prepared.find(tokens).workspace
