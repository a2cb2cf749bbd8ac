"""What a program says about itself: the group map it means to use."""

from __future__ import annotations

import os

from workbench.observe.environment import DIRECTORY
from workbench.ranks import GroupMap


def declare(group_map: GroupMap) -> None:
    """Tell the recording which groups this program means to have, before it makes them. Local.

    Groups are then called by their kind, and a call on another group than meant can be told. Without a recording it
    does nothing.
    """
    if os.environ.get(DIRECTORY):
        from workbench.observe.process import this_process

        this_process.declare(group_map)
