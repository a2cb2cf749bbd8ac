"""A workspace belongs to the process that bound it: in a forked child it refuses, at no cost to the parent's calls.

A child that called would take its parent's place in the group: peers would read its data as the parent's.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Refusing(Protocol):
    """A workspace that can be told to serve no more."""

    def refuse(self, reason: str) -> None:
        """Make each later call a ClosedError that gives the reason, unless it has one already."""
        ...


_bound: dict[int, weakref.ref[Refusing]] = {}


def refuse_in_children(workspace: Refusing) -> None:
    """Let the workspace serve this process only. Local."""
    place = id(workspace)
    _bound[place] = weakref.ref(workspace, lambda _gone: _bound.pop(place, None))


def _in_child() -> None:
    for reference in list(_bound.values()):
        workspace = reference()
        if workspace is not None:
            workspace.refuse(
                f"the workspace belongs to process {os.getppid()}, and this is process {os.getpid()}, forked from it; "
                f"call it there, or give the child a session of its own"
            )


os.register_at_fork(after_in_child=_in_child)
