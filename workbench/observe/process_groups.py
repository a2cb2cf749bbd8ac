"""torch.distributed as a program sees it: each of its functions recorded under its own name, at the program's line.

    collectives    one call each; steps inside an object collective are recorded too, and say inside what
    send, recv     isend, irecv and batches of them too, with the peer
    groups         init_process_group, new_group, destroy_process_group, with the members asked for
    waits          Work.wait, and Store.wait, get and multi_get
Nothing is called that the program does not call, and nothing is changed in what it gets.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs, urlparse

from workbench.observe.below_python import cover_process_group
from workbench.observe.described import Described
from workbench.observe.endings import record_endings, tell_exception
from workbench.observe.gpu import REMARK, start_on_gpu
from workbench.observe.groups import Known, forget_groups, known_group, known_groups, note_group, strange_group
from workbench.observe.process import OPAQUE, this_process
from workbench.observe.stores import meeting_place, record_store_waits, remember_prefixes, store_note
from workbench.observe.works import end_completed, record_work_waits, start_polling, start_work
from workbench.trace import Lane, Recorder, Token

ROOTED = {
    "broadcast": "src",
    "reduce": "dst",
    "gather": "dst",
    "scatter": "src",
    "broadcast_object_list": "src",
    "gather_object": "dst",
    "scatter_object_list": "src",
}
PEERED = {"send": "dst", "isend": "dst", "recv": "src", "irecv": "src"}
OBJECTS = (
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)
PLAIN = (
    *("all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_coalesced", "all_gather_into_tensor"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
    *("all_gather_object", "barrier", "monitored_barrier"),
)
NAMES = {
    "isend": "send",
    "irecv": "recv",
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}
"""Functions recorded under the name of another that does the same."""

_Begun = tuple[Lane | Recorder, Token | None, Any]  # the last: the process group of a call on a GPU


def install(module: Any) -> None:
    """Called once torch.distributed.distributed_c10d has been executed, before anything else can import from it."""
    for name in {*PLAIN, *ROOTED, *PEERED, *NAMES, "send_object_list", "recv_object_list"}:
        if hasattr(module, name):
            setattr(module, name, _recorded(module, name, getattr(module, name)))
    module.init_process_group = _recorded_init(module, module.init_process_group)
    module.new_group = _recorded_new_group(module, module.new_group)
    module.destroy_process_group = _recorded_destroy(module, module.destroy_process_group)
    record_work_waits(module.Work)
    record_store_waits(module.Store)
    remember_prefixes(module.PrefixStore)
    cover_process_group(module.ProcessGroup)
    record_endings()
    this_process.start_rank()


def _recorded(module: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, with a begin and an end around it."""
    op = NAMES.get(name, name)
    what = Described(original, root=ROOTED.get(name, ""), peer=PEERED.get(name, ""))
    group_at, async_at = what.group, what.is_async
    always_async, is_peered = name in ("isend", "irecv"), name in PEERED
    within = name if name in OBJECTS else OPAQUE
    here, member = this_process.here, module.GroupMember

    def describe(key: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any], known: Known) -> dict[str, Any]:
        _, capture, *words = key[:7]
        fields = what.fields(args, kwargs, known.ranks)
        return {"op": op, "path": known.backend, "capture": capture, "remark": _words(*words), **fields}

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any], is_async: bool, inside: str) -> _Begun:
        group = args[group_at] if len(args) > group_at else kwargs.get("group")
        used = member.WORLD if group is None else group
        known = known_groups.get(used)
        is_member, on_gpu = True, False
        if known is None or known.on_gpu or is_peered:  # what the common call need not ask
            known = known_group(used)
            is_member = known is not None
            known = known or strange_group()
            if known is None or (is_peered and not what.names_peer(args, kwargs)):
                return _begin_elsewhere(op, known, _words(group is None, is_member, is_async, False, inside))
            on_gpu = known.on_gpu and not is_peered and what.on_gpu(args, kwargs)
        try:
            frame = sys._getframe(2)
            line, instruction = id(frame.f_code), frame.f_lasti
        except ValueError:  # called by C++ itself, in a thread of its own
            frame, line, instruction = None, 0, 0
        capture = this_process.capturing > 0
        look = what.key(args, kwargs)
        key = (op, capture, group is None, is_member, is_async, on_gpu, inside, line, instruction, *look)
        token = known.lane.begin_known(
            key, frame, describe, args, kwargs, known, note=what.parts(args, kwargs, known.ranks)
        )
        return known.lane, token, used if on_gpu else None

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        inside = here.inside
        if inside is OPAQUE or not this_process.live:
            return original(*args, **kwargs)
        is_async = always_async or (args[async_at] if len(args) > async_at else kwargs.get("async_op", False))
        door: Lane | Recorder
        try:
            door, token, gpu_group = begin(args, kwargs, is_async, inside)
        except Exception as e:  # recording must not fail the call
            this_process.fail(e)
            door, token, gpu_group = this_process.recorder, None, None
        here.inside = within
        try:
            result = original(*args, **kwargs)
        except BaseException as e:
            door.end(token, error=f"{type(e).__name__}: {e}")
            tell_exception(e, door)
            raise
        finally:
            here.inside = inside
        if gpu_group is not None and isinstance(door, Lane) and start_on_gpu(gpu_group, door, token):
            start_polling()
        elif is_async and result is not None:
            start_work(result, door, token, op, polled=not is_peered)
        else:
            door.end(token)
        return result

    return call


def _begin_elsewhere(op: str, known: Known | None, remark: str) -> _Begun:
    """What has no place in its group's sequence: a recv from whoever sends, a call on what is no group of this rank."""
    recorder = this_process.recorder
    note = "" if known is None else f"from any rank on {known.lane.info}"
    return recorder, recorder.begin(op, remark=remark, note=note), None


def _words(by_default: bool, is_member: bool, is_async: bool, on_gpu: bool, inside: str) -> str:
    """The remark of a call."""
    words = [
        *(["default group"] if by_default else []),
        *([] if is_member else ["non-member"]),
        *(["async"] if is_async else []),
        *([REMARK] if on_gpu else []),
        *([f"inside {inside}"] if inside else []),
    ]
    return "; ".join(words)


def _recorded_init(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        given = _given(signature, args, kwargs)
        rank, size = _rank_and_size(given)
        if rank is not None:
            this_process.become(rank, meeting_place(given, os.environ))
        this_process.start_generation()
        label = str(module._world.group_count)
        ranks = tuple(range(size or 0))
        lane = this_process.new_lane(ranks, label, "world") if ranks else None
        note = "; ".join(filter(None, (_timeout_note(given), store_note(given, os.environ))))
        token = (lane or this_process.recorder).begin("init_process_group", note=note)
        if rank is None:
            this_process.early("init_process_group", note=note)
        error = ""
        try:
            result = original(*args, **kwargs)
        except BaseException as e:
            error = f"{type(e).__name__}: {e}"
            raise
        finally:
            if rank is None and not error:
                this_process.become(module.get_rank(), meeting_place(given, os.environ))
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
