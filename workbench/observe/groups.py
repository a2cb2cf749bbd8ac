"""The lane of each process group that this process uses."""

from __future__ import annotations

import os
import weakref
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

_unregistered: weakref.WeakKeyDictionary[Any, Known] = weakref.WeakKeyDictionary()
_places: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Of groups that torch does not count among its own: nobody says when one is destroyed, so none is kept alive."""

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


def note_by_hand(process_group: Any, place: str, *, is_world: bool) -> Known:
    """Open the lane of a group made by hand. place: where its members meet. is_world: they are the whole job."""
    _places[process_group] = place
    if is_world:
        ranks = tuple(range(process_group.size()))
        _unregistered[process_group] = Known(this_process.new_lane(ranks, "", "world"), "", ranks)
        return _unregistered[process_group]
    return _meet_unregistered(process_group)


def known_group(process_group: Any) -> Known | None:
    """What is known of this group; None for what is no group of this process: it is not a member."""
    try:
        known = known_groups.get(process_group) or _unregistered.get(process_group)
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
    _unregistered.clear()
    _strange.clear()


os.register_at_fork(after_in_child=forget_groups)


def _meet(process_group: Any) -> Known | None:
    """A group made in a way that is not recorded."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import Backend  # rpc calls on a bare ProcessGroupGloo, which is one

    is_group = isinstance(process_group, dist.ProcessGroup | Backend)
    if not is_group:
        return None
    try:
        ranks = tuple(dist.get_process_group_ranks(process_group))
        backend = str(dist.get_backend(process_group))
    except (ValueError, RuntimeError, KeyError, AssertionError):
        return _meet_unregistered(process_group)
    kind = "world" if process_group is dist.group.WORLD else ""
    label = str(getattr(process_group, "group_name", ""))
    known = known_groups[process_group] = Known(
        this_process.new_lane(ranks, label, kind), backend, ranks, "nccl" in backend
    )
    return known


def _meet_unregistered(process_group: Any) -> Known:
    """A group whose members torch does not know. Their world ranks are found when the trace is read."""
    place, ranks = _places.get(process_group, ""), tuple(range(process_group.size()))
    lane = this_process.lane_by_hand(ranks, place, process_group.rank())
    known = _unregistered[process_group] = Known(lane, "", ranks)
    return known
