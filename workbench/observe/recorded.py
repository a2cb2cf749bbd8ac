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
from workbench.observe.works import start_work
from workbench.trace import ON_GPU, PLAIN, ROOTED, Lane, Recorder, Token, callers_key, end_after_device

PEERED = {
    **{"send": "dst", "isend": "dst", "recv": "src", "irecv": "src"},
    **{"send_object_list": "dst", "recv_object_list": "src"},
}
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
RECORDED = {*PLAIN, *ROOTED, *PEERED, *NAMES}

_State = tuple[bool, bool, bool]  # whether a call is captured, its group has this rank, a GPU is to do it


def recorded(module: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, with a begin and an end around it."""
    op = NAMES.get(name, name)
    what = Described(original, root=ROOTED.get(name, ""), peer=PEERED.get(name, ""))
    group_at, async_at = what.group, what.is_async
    always_async, is_peered = name in ("isend", "irecv"), name in PEERED
    within = name if name in OBJECTS else OPAQUE
    has_parts = name in ("all_to_all", "all_to_all_single")
    here, world, key_of = this_process.here, module._world, what.key

    def describe(key: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any], known: Known) -> dict[str, Any]:
        _, state, by_default, is_async, inside, *_ = key
        capture, is_member, on_gpu = state or (False, True, False)
        remark = _words(by_default, is_member, is_async, on_gpu, inside, what.tag(args, kwargs))
        fields = what.fields(args, kwargs, known.ranks)
        return {"op": op, "path": known.backend, "capture": capture, "remark": remark, **fields}

    def look_closer(group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Known | None, _State, Any]:
        """What the common call need not ask: its group if it has a lane for it, its state, the GPU that is to do it."""
        known = known_group(group)
        is_member = known is not None
        known = known or strange_group()
        gpu = what.gpu(args, kwargs) if known is not None and known.on_gpu else None
        return known, (this_process.capturing > 0, is_member, gpu is not None), gpu

    # Most calls wait for their peers, and then no cache holds what this needs: so the common case passes few functions.
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        inside = here.inside
        if inside is OPAQUE or not this_process.live:
            return original(*args, **kwargs)
        num = len(args)
        is_async = always_async or (args[async_at] if num > async_at else kwargs.get("async_op", False))
        group = args[group_at] if num > group_at else kwargs.get("group")
        used = world._default_pg if group is None else group  # GroupMember.WORLD, less two functions around it
        lane = token = gpu = held = state = None
        door: Lane | Recorder
        key: tuple[Any, ...]
        if holding:
            held = holding.get(used)
            is_async = held.is_async if held is not None else is_async
        try:
            known = known_groups.get(used)
            if known is None or known.on_gpu or is_peered or this_process.capturing:
                known, state, gpu = look_closer(used, args, kwargs)
            if known is None or (is_peered and not what.names_peer(args, kwargs)):
                is_member = state is None or state[1]
                token = _begin_elsewhere(op, known, _words(group is None, is_member, is_async, False, inside, 0))
            else:
                try:
                    frame = sys._getframe(1)
                    line, instruction = id(frame.f_code), frame.f_lasti
                except ValueError:  # called by C++ itself, in a thread of its own
                    frame, line, instruction = None, 0, 0
                key = (op, state, group is None, is_async, inside, line, instruction, key_of(args, kwargs))
                lane = known.lane
                if line in lane.called_from:
                    key = (*key, callers_key(frame))
                try:
                    head, end_head, numbers, _ = lane.known[key]
                except (KeyError, TypeError):
                    head, end_head, numbers, _ = lane.meet(key, frame, describe, (args, kwargs, known))
                sequence = next(numbers)
                if not is_peered:
                    lane.latest = sequence
                lane.write(sequence, head, what.parts(args, kwargs, known.ranks) if has_parts else "")
                token = end_head, sequence
        except Exception as e:  # recording must not fail the call
            this_process.fail(e)
            lane = token = gpu = None
        here.inside = within
        try:
            result = original(*args, **kwargs)
        except BaseException as e:
            door = lane or this_process.recorder
            door.end(token, error=f"{type(e).__name__}: {e}")
            tell_exception(e, door)
            raise
        finally:
            here.inside = inside
        if lane is not None and gpu is None and held is None and not is_async:
            lane.write(sequence, end_head, "")  # as door.end(token) does
            return result
        door = lane or this_process.recorder
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


def _begin_elsewhere(op: str, known: Known | None, remark: str) -> Token | None:
    """What has no place in its group's sequence: a recv from whoever sends, a call on what is no group of this rank."""
    note = "" if known is None else f"from any rank on {known.lane.info}"
    return this_process.recorder.begin(op, remark=remark, note=note)


def _words(by_default: bool, is_member: bool, is_async: bool, on_gpu: bool, inside: str, tag: int) -> str:
    """The remark of a call."""
    words = [
        *(["default group"] if by_default else []),
        *([] if is_member else ["non-member"]),
        *(["async"] if is_async else []),
        *([ON_GPU] if on_gpu else []),
        *([f"inside {inside}"] if inside else []),
        *([f"tag {tag}"] if tag else []),
    ]
    return "; ".join(words)
