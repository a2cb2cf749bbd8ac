"""One function of torch.distributed, recorded: a begin and an end around each of its calls, at the program's line.

Every call of a program passes here, so what does not differ from call to call is found once: what a call says of itself
is described for each line and kind of argument, and later only looked up.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from workbench.observe.coalesced import holding
from workbench.observe.described import Described
from workbench.observe.endings import tell_exception
from workbench.observe.groups import Known, known_group, known_groups, strange_group
from workbench.observe.process import OPAQUE, this_process
from workbench.observe.works import ON_GPU, start_work
from workbench.trace import PLAIN, ROOTED, Lane, Recorder, Token, end_after_device

PEERED = {"send": "dst", "isend": "dst", "recv": "src", "irecv": "src"}
OBJECTS = (
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)
NAMES = {
    "isend": "send",
    "irecv": "recv",
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}
"""Functions recorded under the name of another that does the same."""
RECORDED = {*PLAIN, *ROOTED, *PEERED, *NAMES, "send_object_list", "recv_object_list"}

_Begun = tuple[Lane | Recorder, Token | None, Any]  # the last: the GPU that is to do the call, or None


def recorded(module: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, with a begin and an end around it."""
    op = NAMES.get(name, name)
    what = Described(original, root=ROOTED.get(name, ""), peer=PEERED.get(name, ""))
    group_at, async_at = what.group, what.is_async
    always_async, is_peered = name in ("isend", "irecv"), name in PEERED
    within = name if name in OBJECTS else OPAQUE
    has_parts = name in ("all_to_all", "all_to_all_single")
    here, world = this_process.here, module._world

    def describe(key: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any], known: Known) -> dict[str, Any]:
        _, capture, *words = key[:7]
        fields = what.fields(args, kwargs, known.ranks)
        return {"op": op, "path": known.backend, "capture": capture, "remark": _words(*words), **fields}

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any], is_async: bool, inside: str) -> _Begun:
        group = args[group_at] if len(args) > group_at else kwargs.get("group")
        used = world._default_pg if group is None else group  # GroupMember.WORLD, less the two functions around it
        known = known_groups.get(used)
        is_member, gpu = True, None
        if known is None or known.on_gpu or is_peered:  # what the common call need not ask
            known = known_group(used)
            is_member = known is not None
            known = known or strange_group()
            if known is None or (is_peered and not what.names_peer(args, kwargs)):
                return _begin_elsewhere(op, known, _words(group is None, is_member, is_async, False, inside))
            gpu = what.gpu(args, kwargs) if known.on_gpu else None
        try:
            frame = sys._getframe(2)
            line, instruction = id(frame.f_code), frame.f_lasti
        except ValueError:  # called by C++ itself, in a thread of its own
            frame, line, instruction = None, 0, 0
        capture = this_process.capturing > 0
        look = what.key(args, kwargs)
        key = (op, capture, group is None, is_member, is_async, gpu is not None, inside, line, instruction, look)
        note = what.parts(args, kwargs, known.ranks) if has_parts else ""
        token = known.lane.begin_known(key, frame, describe, (args, kwargs, known), note)
        return known.lane, token, gpu

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        inside = here.inside
        if inside is OPAQUE or not this_process.live:
            return original(*args, **kwargs)
        is_async = always_async or (args[async_at] if len(args) > async_at else kwargs.get("async_op", False))
        held = None
        if holding:
            group = args[group_at] if len(args) > group_at else kwargs.get("group")
            held = holding.get(world._default_pg if group is None else group)
            is_async = held.is_async if held is not None else is_async
        door: Lane | Recorder
        try:
            door, token, gpu = begin(args, kwargs, is_async, inside)
        except Exception as e:  # recording must not fail the call
            this_process.fail(e)
            door, token, gpu = this_process.recorder, None, None
        here.inside = within
        try:
            result = original(*args, **kwargs)
        except BaseException as e:
            door.end(token, error=f"{type(e).__name__}: {e}")
            tell_exception(e, door)
            raise
        finally:
            here.inside = inside
        if held is not None:
            held.add(door, token, op, gpu)
        elif gpu is not None and this_process.capturing:
            door.end(token)  # what is to be waited for is the graph
        elif is_async and result is not None:
            start_work(result, door, token, op, polled=gpu is not None or not is_peered, on_gpu=gpu is not None)
        elif gpu is not None:
            end_after_device(door, token, gpu)
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
        *([ON_GPU] if on_gpu else []),
        *([f"inside {inside}"] if inside else []),
    ]
    return "; ".join(words)
