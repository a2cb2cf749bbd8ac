"""Groups that a program makes by hand: ProcessGroup(store, rank, size), then a backend on the same store.

vLLM's engines meet so (stateless_init_torch_distributed_process_group, vllm/distributed/utils.py), in processes that
have no rank by themselves. Such a process is recorded as that rank, of a job whose world is that group. A group beside
a world counts its members by itself; who they are is found when the trace is read.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from typing import Any

from workbench.observe.groups import Known, note_by_hand
from workbench.observe.process import this_process
from workbench.observe.stores import meeting_place, store_note


class _Made(threading.local):
    """The store of the group that this thread has made, and what is known of it, until its backend is made."""

    store: Any = None
    known: Known | None = None


def record_groups_by_hand(module: Any) -> None:
    """Put the recording into the constructors of ProcessGroup and of the gloo backend, which waits for all members."""
    made = _Made()
    _give_rank(module, made)
    if module.is_gloo_available():
        _record_meeting(module.ProcessGroupGloo, made)


def _give_rank(module: Any, made: _Made) -> None:
    make = module.ProcessGroup.__init__

    @functools.wraps(make)
    def recorded_make(group: Any, *args: Any, **kwargs: Any) -> None:
        make(group, *args, **kwargs)
        store = next((a for a in (*args, *kwargs.values()) if isinstance(a, module.Store)), None)
        is_torchs_own = sys._getframe(1).f_globals.get("__name__") == module.__name__
        if this_process.here.inside or store is None or is_torchs_own:
            return
        try:
            place, is_world = meeting_place({"store": store}, os.environ), not this_process.recorder.enabled
            if is_world:
                this_process.become(group.rank(), place, by_hand=True)
                this_process.start_generation()
            made.store, made.known = store, note_by_hand(group, place, is_world=is_world)
        except Exception as e:  # recording must not fail the call
            this_process.fail(e)

    module.ProcessGroup.__init__ = recorded_make


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
        is_world = known.lane.info is not None and known.lane.info.key.kind == "world"
        op = "init_process_group" if is_world else "make_group"
        token = known.lane.begin(op, note=meets, remark="by hand")
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
