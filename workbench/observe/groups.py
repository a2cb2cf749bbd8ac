"""The lane of each process group that this process uses."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from workbench.observe.process import this_process
from workbench.trace import Lane


@dataclass(frozen=True, slots=True)
class Known:
    """A process group: its lane, backend and members, as torch numbers them. on_gpu: calls return before they end."""

    lane: Lane
    backend: str
    ranks: tuple[int, ...]
    on_gpu: bool = False


known_groups: dict[Any, Known] = {}
"""By process group. Read at every call; `known_group` fills it."""

_strange: list[Known] = []  # groups that this process helped to make and is no member of


def note_group(process_group: Any, lane: Lane | None) -> None:
    """Remember the lane that was opened for this group while it was made."""
    import torch.distributed as dist

    if lane is None or lane.info is None:
        return
    if isinstance(process_group, dist.ProcessGroup):
        backend = str(dist.get_backend(process_group))
        known_groups[process_group] = Known(lane, backend, lane.info.world_ranks, "nccl" in backend)
    else:
        _strange.append(Known(lane, "", lane.info.world_ranks))


def known_group(process_group: Any) -> Known | None:
    """What is known of this group; None for what is no group of this process: it is not a member."""
    try:
        known = known_groups.get(process_group)
    except TypeError:
        return None
    return _meet(process_group) if known is None else known


def strange_group() -> Known | None:
    """The group that a handle of a non-member stands for, if there is only one it can be: torch gives all the same."""
    return _strange[0] if len(_strange) == 1 else None


def forget_group(process_group: Any) -> None:
    """The group is destroyed: kept any longer, it would keep its threads and connections."""
    known_groups.pop(process_group, None)


def forget_groups() -> None:
    """All groups are destroyed, or this is a forked child."""
    known_groups.clear()
    _strange.clear()


os.register_at_fork(after_in_child=forget_groups)


def _meet(process_group: Any) -> Known | None:
    """A group made in a way that is not recorded. One that torch has no members of counts them from 0."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import Backend  # rpc calls on a bare ProcessGroupGloo, which is one

    is_group = isinstance(process_group, dist.ProcessGroup | Backend)
    if not is_group:
        return None
    kind = ""
    try:
        ranks = tuple(dist.get_process_group_ranks(process_group))
        backend = str(dist.get_backend(process_group))
        if process_group is dist.group.WORLD:
            kind = "world"
    except (ValueError, RuntimeError, KeyError, AssertionError):
        ranks, backend, kind = tuple(range(process_group.size())), "", "unregistered"
    label = str(getattr(process_group, "group_name", ""))
    known = known_groups[process_group] = Known(
        this_process.new_lane(ranks, label, kind), backend, ranks, "nccl" in backend
    )
    return known
