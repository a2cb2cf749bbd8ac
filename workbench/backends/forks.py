"""A workspace, and a session, belong to the process that made them: in a forked child they refuse, at no cost to calls.

A child that called would take its parent's place in the group: peers would read its data as the parent's. Even a child
that only leaves a `with` block would tell the peers that its parent has left.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Refusing(Protocol):
    """What can be told to serve no more."""

    def refuse(self, reason: str) -> None:
        """Make each later call a ClosedError that gives the reason, unless it has one already."""
        ...


_bound: dict[int, tuple[weakref.ref[Refusing], str]] = {}


def refuse_in_children(bound: Refusing, word: str = "workspace") -> None:
    """Let a workspace or session serve this process only; `word` is what children are told of it. Local."""
    place = id(bound)
    _bound[place] = weakref.ref(bound, lambda _gone: _bound.pop(place, None)), word


def _in_child() -> None:
    for reference, word in list(_bound.values()):
        bound = reference()
        if bound is not None:
            bound.refuse(
                f"the {word} belongs to process {os.getppid()}, and this is process {os.getpid()}, forked from it; "
                f"call it there, or give the child a session of its own"
            )


os.register_at_fork(after_in_child=_in_child)
