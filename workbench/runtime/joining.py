"""Joining: the ranks of a map meet, compare what they came with, and make their groups. What fails is told to all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch.distributed as dist

from workbench.errors import CallFailedError, ClosedError, WorkbenchError
from workbench.ranks import GroupMap
from workbench.runtime.devices import let_nccl_share
from workbench.runtime.hello import exchange_hello
from workbench.runtime.members import OPENING, Member, opening_watch
from workbench.runtime.opening import open_trace
from workbench.runtime.process_group import (
    TorchGroups,
    destroy_default_group,
    init_default_group,
    make_groups,
    next_session_store,
)
from workbench.runtime.story import Story
from workbench.runtime.subgroup import BoundGroup, bind_group, own_groups
from workbench.settings import Settings
from workbench.trace import Recorder


@dataclass(frozen=True, slots=True)
class Joined:
    """What a session holds since its ranks last met. `closing` leaves the torch groups.   generation: how often before.

    groups: this rank's, by their rank lists.
    """

    world_rank: int
    store: dist.Store
    members: Mapping[int, Member]
    groups: Mapping[tuple[int, ...], BoundGroup]
    closing: ExitStack
    trace: Recorder
    generation: int


def join_ranks(
    group_map: GroupMap,
    *,
    device: str,
    settings: Settings,
    timeout_s: float,
    trace: Recorder,
    trace_dir: str | None,
    problem: Exception | None,
    before: Joined | None,
    broken: Callable[[], bool],
) -> Joined:
    """Make the default group if there is none, compare what the ranks came with, and make the groups of the map.

    problem: what this rank cannot go on with: every rank hears it, and of any other error here.   before: what a
    rebuild has left.   broken: whether a call may still be waiting in the groups when they are left.
    Collective: every rank of the map.   Raises: as exchange_hello; CallFailedError for what nobody foresaw.
    """
    with ExitStack() as opened, ExitStack() as undo:
        watch = opening_watch(before.members, before.store, before.world_rank) if before is not None else None
        if init_default_group(device, timeout_s, now_and_then=watch):
            undo.callback(destroy_default_group)
        world_rank = dist.get_rank()
        store = next_session_store()
        try:
            if not trace.enabled:
                trace, unwritable = open_trace(trace_dir, world_rank)
                opened.callback(trace.close)
                problem = problem or unwritable
            members = exchange_hello(
                store,
                group_map,
                world_rank=world_rank,
                world_size=dist.get_world_size(),
                device=device,
                settings=settings,
                problem=problem,
                timeout_s=timeout_s,
                now_and_then=opening_watch(before.members if before is not None else {}, store, world_rank),
            )
            if device == "cuda":
                let_nccl_share(settings)
            watch = opening_watch(members, store, world_rank)
            made = make_groups(group_map, device=device, timeout_s=timeout_s, on_failure=watch)
            undo.callback(_leave_groups, made, broken)
            generation = 0 if before is None else before.generation + 1
            groups = {
                own.key.world_ranks: bind_group(
                    own.key,
                    made.get(own.key.world_ranks),
                    members,
                    world_rank=world_rank,
                    device=device,
                    store=store,
                    timeout_s=timeout_s,
                    lane=trace.group(own.key, label=own.kinds, ordinal=own.ordinal, generation=generation),
                )
                for own in own_groups(group_map, world_rank)
            }
        except WorkbenchError:
            raise
        except Exception as e:
            raise Story(store, OPENING).tell(CallFailedError.arose(group_map.system, OPENING, world_rank, e)) from e
        except BaseException as e:  # Ctrl-C: this rank's alone, and nobody is to wait for it
            left = f"{group_map.system}: {OPENING} on world rank {world_rank} was interrupted: {type(e).__name__}"
            Story(store, OPENING).tell(ClosedError(left))
            raise
        opened.pop_all()
        return Joined(world_rank, store, members, groups, undo.pop_all(), trace, generation)


def _leave_groups(made: Mapping[tuple[int, ...], TorchGroups], broken: Callable[[], bool]) -> None:
    for groups in made.values():
        if broken():
            groups.abandon()
        else:
            groups.destroy()
