"""Groups that a program makes by hand: ProcessGroup(store, rank, size), then a backend on the same store.

vLLM's engines meet so (stateless_init_torch_distributed_process_group, vllm/distributed/utils.py), in processes that
have no rank by themselves. Such a process is recorded as that rank, of a job whose world is that group.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from workbench.observe.groups import Known, forget_group, known_groups
from workbench.observe.process import this_process
from workbench.observe.stores import meeting_place, store_note


class _Made:
    """The store of the group that gave this process its rank, and what is known of it, until its backend is made."""

    store: Any = None
    known: Known | None = None


def record_groups_by_hand(module: Any) -> None:
    """Put the recording into the constructors of ProcessGroup and of the gloo backend, which waits for all members."""
    made = _Made()
    _give_rank(module.ProcessGroup, module.Store, made)
    if module.is_gloo_available():
        _record_meeting(module.ProcessGroupGloo, made)


def _give_rank(group_class: Any, store_class: Any, made: _Made) -> None:
    make = group_class.__init__

    @functools.wraps(make)
    def recorded_make(group: Any, *args: Any, **kwargs: Any) -> None:
        make(group, *args, **kwargs)
        if this_process.here.inside or this_process.recorder.enabled:
            return  # torch's own, or one of a process whose rank is known: it is met at its first call
        store = next((a for a in (*args, *kwargs.values()) if isinstance(a, store_class)), None)
        if store is not None:
            try:
                made.store, made.known = store, _begin_world(group, store)
            except Exception as e:  # recording must not fail the call
                this_process.fail(e)

    group_class.__init__ = recorded_make
    for name in ("shutdown", "abort"):
        setattr(group_class, name, _forgetting(getattr(group_class, name)))


def _begin_world(group: Any, store: Any) -> Known:
    this_process.become(group.rank(), meeting_place({"store": store}, os.environ), by_hand=True)
    this_process.start_generation()
    ranks = tuple(range(group.size()))
    known = known_groups[group] = Known(this_process.new_lane(ranks, "", "world"), "", ranks)
    return known


def _forgetting(end: Callable[..., Any]) -> Callable[..., Any]:
    """For groups that no destroy_process_group ends: vLLM's stateless_destroy_torch_distributed_process_group."""

    @functools.wraps(end)
    def forgetting_end(group: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return end(group, *args, **kwargs)
        finally:
            known = known_groups.get(group)
            if known is not None and not known.backend:  # one that torch does not count among its own
                forget_group(group)

    return forgetting_end


def _record_meeting(backend_class: Any, made: _Made) -> None:
    make, here = backend_class.__init__, this_process.here

    @functools.wraps(make)
    def recorded_make(backend: Any, *args: Any, **kwargs: Any) -> None:
        known, store = made.known, made.store
        if here.inside or known is None or not any(a is store for a in (*args, *kwargs.values())):
            make(backend, *args, **kwargs)
            return
        made.known = made.store = None
        given, error = {"store": store}, ""
        meets = f"meets at {meeting_place(given, os.environ)}; {store_note(given, os.environ)}"
        token = known.lane.begin("init_process_group", note=meets, remark="by hand")
        here.inside = "init_process_group"
        try:
            make(backend, *args, **kwargs)
        except BaseException as e:
            error = f"{type(e).__name__}: {e}"
            raise
        finally:
            here.inside = ""
            known.lane.end(token, error=error)

    backend_class.__init__ = recorded_make
