"""torch.distributed as a program sees it: each of its functions recorded under its own name, at the program's line.

    collectives    one call each; steps inside an object collective are recorded too, and say inside what
    send, recv     isend, irecv and batches of them too, with the peer
    coalesced      calls that torch holds back, until it has made them
    groups         init_process_group, new_group, destroy_process_group, with the members asked for
    waits          Work.wait, and Store.wait, get and multi_get
Nothing is called that the program does not call, and nothing is changed in what it gets.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs, urlparse

from workbench.observe.below_python import cover_process_group
from workbench.observe.by_hand import record_groups_by_hand
from workbench.observe.coalesced import recorded_manager
from workbench.observe.endings import record_endings, tell_exception
from workbench.observe.groups import forget_group, forget_groups, known_group, note_group
from workbench.observe.process import this_process
from workbench.observe.recorded import RECORDED, recorded
from workbench.observe.stores import meeting_place, record_store_waits, remember_prefixes, store_note
from workbench.observe.works import end_completed, record_work_waits
from workbench.trace import Lane, Recorder


def install(module: Any) -> None:
    """Called once torch.distributed.distributed_c10d has been executed, before anything else can import from it."""
    for name in RECORDED:
        if hasattr(module, name):
            setattr(module, name, recorded(module, name, getattr(module, name)))
    module.init_process_group = _recorded_init(module, module.init_process_group)
    module.new_group = _recorded_new_group(module, module.new_group)
    module._coalescing_manager = recorded_manager(module, module._coalescing_manager)
    module.destroy_process_group = _recorded_destroy(module, module.destroy_process_group)
    record_work_waits(module.Work)
    record_store_waits(module.Store)
    remember_prefixes(module.PrefixStore)
    cover_process_group(module.ProcessGroup)
    record_groups_by_hand(module)
    record_endings()
    this_process.start_rank()


def _recorded_init(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)
    here = this_process.here

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        given = _given(signature, args, kwargs)
        rank, size = _rank_and_size(given)
        place = meeting_place(given, os.environ)
        if rank is not None and this_process.become(rank, place):
            forget_groups()  # those made by hand belong to the rank it was so far
        this_process.start_generation()
        label = str(module._world.group_count)
        ranks = tuple(range(size or 0))
        lane = this_process.new_lane(ranks, label, "world") if ranks else None
        store = store_note(given, os.environ)
        meets = f"meets at {place}" if place and not store.startswith("store of the launcher") else ""
        note = "; ".join(filter(None, (_timeout_note(given), meets, store)))
        token = (lane or this_process.recorder).begin("init_process_group", note=note)
        if rank is None:
            this_process.early("init_process_group", note=note)
        error = ""
        inside, here.inside = here.inside, "init_process_group"
        try:
            result = original(*args, **kwargs)
        except BaseException as e:
            error = f"{type(e).__name__}: {e}"
            raise
        finally:
            here.inside = inside
            if rank is None and not error:
                this_process.become(module.get_rank(), place)
            (lane or this_process.recorder).end(token, error=error)
        note_group(module.GroupMember.WORLD, lane)
        return result

    return init_process_group


def _recorded_new_group(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)
    here = this_process.here

    @functools.wraps(original)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        if not module.is_initialized():
            return original(*args, **kwargs)
        given = _given(signature, args, kwargs)
        asked = given.get("ranks")
        ranks = tuple(range(module.get_world_size())) if asked is None else tuple(asked)
        ordered = tuple(sorted(ranks))
        hashed = given.get("use_local_synchronization") and module.get_rank() in ranks
        label = module._hash_ranks_to_str(list(ordered)) if hashed else str(module._world.group_count)
        lane = this_process.new_lane(ordered, label)
        note = _timeout_note(given)
        if ranks != ordered:
            note = f"{note}; asked for in the order {list(ranks)}"
        token = lane.begin("new_group", note=note, path=given.get("backend"))
        inside, here.inside = here.inside, "new_group"
        try:
            result = original(*args, **kwargs)
        except BaseException as e:
            lane.end(token, error=f"{type(e).__name__}: {e}")
            tell_exception(e, lane)
            raise
        finally:
            here.inside = inside
        lane.end(token)
        note_group(result, lane)
        return result

    return new_group


def _recorded_destroy(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> Any:
        world = module.GroupMember.WORLD
        known = known_group(group or world) if module.is_initialized() else None
        door: Lane | Recorder = known.lane if known is not None else this_process.recorder
        end_completed()
        token = door.begin("destroy_process_group", remark="" if group is not None else "default group")
        try:
            result = original(group)
        except BaseException as e:
            door.end(token, error=f"{type(e).__name__}: {e}")
            raise
        door.end(token)
        if group is None or group is world:
            forget_groups()
        else:
            forget_group(group)
        return result

    return destroy_process_group


def _given(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name; {} for a call that does not fit, which torch itself will refuse."""
    try:
        return dict(signature.bind(*args, **kwargs).arguments)
    except TypeError:
        return {}


def _rank_and_size(given: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """What init_process_group is told: by its arguments, by the address, else by the environment."""
    query = parse_qs(urlparse(given.get("init_method") or "").query)
    found = []
    for name, variable in (("rank", "RANK"), ("world_size", "WORLD_SIZE")):
        value = given.get(name, -1)
        for text in (*query.get(name, ()), os.environ.get(variable, "")):
            if not isinstance(value, int) or value < 0:
                value = int(text) if text.isdigit() else -1
        found.append(value if isinstance(value, int) and value >= 0 else None)
    return found[0], found[1]


def _timeout_note(given: Mapping[str, Any]) -> str:
    timeout = given.get("timeout")
    return "no timeout given" if timeout is None else f"timeout {timeout.total_seconds():g} s"
