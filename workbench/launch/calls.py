"""Calls of torch.distributed in a rank of a cluster: each one recorded, and none let through on a group that is lost.

The record is what answers "where does each rank stand, and who is missing" while ranks hang.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from workbench.errors import ClosedError
from workbench.launch.waits import arrive, cpu_call, replace_in_torch
from workbench.ranks import GroupKey, GroupMap
from workbench.runtime.process_group import default_store
from workbench.trace import PLAIN, ROOTED, Lane, Recorder

_PEER = {
    "send": "dst",
    "isend": "dst",
    "send_object_list": "dst",
    "recv": "src",
    "irecv": "src",
    "recv_object_list": "src",
}
_INPUTS = ("tensor", "input_tensor", "input", "input_list", "input_tensor_list", "tensors")
_WHOLE_WORLD = ("init_process_group", "new_group")


@dataclass(slots=True)
class _Group:
    """What is known of one process group. `lost` says which of its calls was interrupted; "" if none.

    connected: who has come to a first call on CUDA tensors together: "all", or a pair such as "0-1".
    """

    key: GroupKey
    lane: Lane
    backend: str
    lost: str = ""
    connected: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Started:
    """A call with async_op=True, or an isend or irecv: what its wait is to be called, and where."""

    text: str
    group: _Group
    on_cpu: bool


class CallRecorder:
    """Records the calls of this process into `recorder`. One a process; `install` puts it in place.

    group_map gives groups the name of their kind; others are called "world" and "group".
    timeout_s is how long the first call of a group on CUDA tensors waits for the other members.
    """

    def __init__(self, recorder: Recorder, group_map: GroupMap | None, *, timeout_s: float) -> None:
        self._recorder = recorder
        self._timeout_s = timeout_s
        self._kinds: dict[tuple[int, ...], str] = {}
        for kind, lists in group_map.groups.items() if group_map is not None else ():
            for ranks in lists:
                self._kinds.setdefault(tuple(sorted(ranks)), kind)
        self._groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _Group] = weakref.WeakKeyDictionary()
        self._num_groups = 0
        self._generation = 0
        self._gpu_lost = ""  # what the groups with NCCL were lost to, those not met yet as well
        self._inside = threading.local()
        self._unfinished: weakref.WeakKeyDictionary[dist.Work, _Started] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        """Put the recording in front of torch.distributed's functions. After `poll_waits`. Local."""
        for name in (*PLAIN, *ROOTED, *_PEER):
            replace_in_torch(name, functools.partial(self._on_group, name))
        for name in _WHOLE_WORLD:
            replace_in_torch(name, functools.partial(self._on_world, name))
        wait = dist.Work.wait

        def recorded_wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            return self._wait(wait, work, *args, **kwargs)

        dist.Work.wait = recorded_wait  # type: ignore[method-assign,assignment]  # as in waits

    def start_generation(self, number: int) -> None:
        """Groups met from now on belong to generation `number`; those before are forgotten. Local."""
        self._generation = number
        self._gpu_lost = ""
        self._groups.clear()
        self._num_groups = 0
        self._recorder.instant("generation", note=str(number))

    def lose_gpu_groups(self) -> None:
        """Let no call through on groups with NCCL before the next generation. Local; any thread."""
        self._gpu_lost = "a wait on the GPU"
        for group in list(self._groups.values()):
            if "nccl" in group.backend:
                group.lost = group.lost or self._gpu_lost

    def _on_group(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "call", False) or not dist.is_initialized():
                return original(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            process_group = given.get("group") or dist.group.WORLD
            if process_group not in dist.distributed_c10d._world.pg_map:
                return original(*args, **kwargs)  # not a member: torch says so, or does nothing
            group = self._group(process_group)
            if group.lost:
                raise ClosedError(
                    f"{group.lost} was interrupted, and since then the members of {group.key} do not agree on the next "
                    f"call; run cluster.rebuild()"
                )
            tensor = _input_of(given)
            on_cpu = _on_cpu(given, group, tensor)
            fields = _fields(name, given, group, tensor)
            if name in _PEER and fields["peer_world_rank"] is None:  # from whoever sends: nobody's sequence
                token, text = self._recorder.begin(name, note=f"from any rank on {group.key}"), f"{name} on {group.key}"
                end = self._recorder.end
            else:
                token, end = group.lane.begin(name, **fields), group.lane.end
                text = f"{name} #{token[1]} on {group.key}" if token else f"{name} on {group.key}"
            self._inside.call = True
            try:
                with cpu_call(on_cpu):
                    if not on_cpu:
                        self._connect(process_group, group, text, fields.get("peer_world_rank"))
                    result = original(*args, **kwargs)
            except BaseException as e:
                end(token, error=f"{type(e).__name__}: {e}")
                if isinstance(e, KeyboardInterrupt):
                    group.lost = text
                raise
            finally:
                self._inside.call = False
            started = isinstance(result, dist.Work)
            if started:
                self._unfinished[result] = _Started(text, group, on_cpu)
            end(token, note="started" if started else "")
            return result

        return call

    def _on_world(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """A call that every rank of the world makes and that has no group yet."""

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            token = self._recorder.begin(name, note=_ranks_of(name, args, kwargs))
            try:
                result = original(*args, **kwargs)
            except BaseException as e:
                self._recorder.end(token, error=f"{type(e).__name__}: {e}")
                raise
            self._recorder.end(token)
            return result

        return call

    def _wait(self, wait: Callable[..., Any], work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        """Work.wait; for a call that was only started before, a wait of its own in the record."""
        started = self._unfinished.pop(work, None)
        if started is None:
            return wait(work, *args, **kwargs)
        token = self._recorder.begin("wait", note=f"for {started.text}")
        try:
            with cpu_call(started.on_cpu):
                result = wait(work, *args, **kwargs)
        except BaseException as e:
            self._recorder.end(token, error=f"{type(e).__name__}: {e}")
            if isinstance(e, KeyboardInterrupt):
                started.group.lost = started.text
            raise
        self._recorder.end(token)
        return result

    def _connect(self, process_group: dist.ProcessGroup, group: _Group, text: str, peer: int | None) -> None:
        """Before the first call on CUDA tensors: wait here until all who take part have come.

        NCCL makes a communicator in that call, one for the group and one for each pair that sends and receives. It
        waits for the others in C++, before anything runs that could be aborted.
        """
        pair = () if peer is None else tuple(sorted({dist.get_rank(), peer}))
        who = "-".join(map(str, pair)) or "all"
        together = process_group in dist.distributed_c10d._world.pg_coalesce_state  # a batch: its end is what waits
        if who not in group.connected and not together:
            name = f"workbench/connect/{process_group.group_name}/{who}"
            members = pair or group.key.world_ranks
            arrive(default_store(), name, members, dist.get_rank(), self._timeout_s, what=text)
            group.connected.add(who)

    def _group(self, process_group: dist.ProcessGroup) -> _Group:
        known = self._groups.get(process_group)
        if known is None:
            ranks = tuple(dist.get_process_group_ranks(process_group))
            world = process_group is dist.group.WORLD
            kind = "world" if world else self._kinds.get(tuple(sorted(ranks)), "group")
            key = GroupKey(kind, ranks)
            lane = self._recorder.group(key, ordinal=self._num_groups, generation=self._generation)
            self._num_groups += 1
            backend = str(dist.get_backend(process_group))
            lost = self._gpu_lost if "nccl" in backend else ""
            known = self._groups[process_group] = _Group(key, lane, backend, lost)
        return known


def _fields(name: str, given: Mapping[str, Any], group: _Group, tensor: torch.Tensor | None) -> dict[str, Any]:
    """What Lane.begin is to be told of a call."""
    fields: dict[str, Any] = {"path": group.backend}
    if tensor is not None:
        fields |= {"shape": tuple(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    if name in ROOTED:
        fields["root_world_rank"] = given.get(ROOTED[name])
        place = given.get(f"group_{ROOTED[name]}")
        if place is not None:
            fields["root_group_rank"] = place
    if name in _PEER:
        peer = given.get(_PEER[name])
        place = given.get(f"group_{_PEER[name]}")
        fields["peer_world_rank"] = peer if place is None else group.key.world_ranks[place]
    return fields


def _on_cpu(given: Mapping[str, Any], group: _Group, tensor: torch.Tensor | None) -> bool:
    """Whether the call works on CPU tensors. torch keeps objects and barriers on the CPU where a group has gloo."""
    if tensor is not None:
        return tensor.device.type == "cpu"
    return "gloo" in group.backend and not given.get("device_ids")


def _input_of(given: Mapping[str, Any]) -> torch.Tensor | None:
    """The tensor that the call sends, or the one it receives into; the first of several."""
    for name in _INPUTS:
        value = given.get(name)
        value = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(value, torch.Tensor):
            return value
    return None


def _ranks_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    if name != "new_group":
        return ""
    ranks = kwargs.get("ranks", args[0] if args else None)
    return "all ranks" if ranks is None else f"world ranks {', '.join(map(str, ranks))}"
