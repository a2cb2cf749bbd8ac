"""The default process group and the subgroups of a GroupMap: made in one order, each with an explicit timeout.

torch's `new_group` has traps that this file answers: its name counter hangs the world when ranks call it in different
orders, and it does not inherit the timeout of `init_process_group`. So maps are compared first (Session does), every
rank walks the same list, and every call carries its timeout.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from workbench.errors import ArgumentError, DeadlineError
from workbench.ranks import GroupMap
from workbench.runtime.members import gather_over_store

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_base_store: dist.Store | None = None  # one connection a process: a second one to the same store would start it anew
_generation = 0
_default_groups = 0  # made in this generation; counts alike on every rank, as does the next
_sessions = 0


@dataclass(frozen=True, slots=True)
class TorchGroups:
    """The two torch groups behind one rank list: gloo for control, and the one for data (the same object on CPU)."""

    control: dist.ProcessGroup
    data: dist.ProcessGroup
    device: str

    def destroy(self) -> None:
        """Destroy both. Local."""
        for group in {self.control, self.data}:
            with contextlib.suppress(ValueError):  # the default group was destroyed first, and took this one along
                dist.destroy_process_group(group)

    def abandon(self) -> None:
        """Leave both as they are, for ever: a group with a call that never ends blocks in its destructor."""
        for group in {self.control, self.data}:
            _keep_for_ever(group)


def init_default_group(device: str, timeout_s: float, *, now_and_then: Callable[[], None] | None = None) -> bool:
    """Make the default group from torchrun's environment unless there is one; True if this call made it.

    Collective over all ranks. A second generation in the same process gets a fresh prefix of the store, since the agent
    of torchrun keeps the store and its keys across generations.
    """
    if dist.is_initialized():
        return False
    timeout = timedelta(seconds=timeout_s)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    store = next_store(timeout)
    world_size, rank = _whole("WORLD_SIZE", 1), _whole("RANK", 0)
    gather_over_store(  # torch's own wait names a store key; this one names the ranks
        store,
        "arrived",
        world_rank=rank,
        world_size=world_size,
        value=True,
        timeout_s=timeout_s,
        what="making the default process group",
        now_and_then=now_and_then,
    )
    dist.distributed_c10d._world.group_count = 0  # a start that failed has counted: ranks would use different names
    with _torch_waits("making the default process group", rank, now_and_then):
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return True


def destroy_default_group() -> None:
    """Destroy the default group, unless somebody did already. Local."""
    if dist.is_initialized():
        dist.destroy_process_group()


def default_store() -> dist.Store:
    """The store of the default group."""
    return dist.distributed_c10d._get_default_store()


def next_store(timeout: timedelta) -> dist.Store:
    """The store for this process's next default group: a prefix of the job's store that no earlier group has used."""
    global _default_groups
    _default_groups += 1
    return dist.PrefixStore(f"workbench/generation{_generation}/{_default_groups}", _connect(timeout))


def next_session_store() -> dist.Store:
    """The store for this process's next Session: a prefix of the default group's store that no earlier one has used."""
    global _sessions
    _sessions += 1
    return dist.PrefixStore(f"workbench/session{_sessions}", default_store())


def start_generation(number: int) -> None:
    """Leave every group of this process, whatever state it is in, and let those made from now on be of `number`.

    For a job whose ranks stand in different places after a failure: a new number that all ranks are given brings them
    together again in the same processes. Groups with a call that never ends are kept: their destructor would wait.
    Local; every rank of the job calls it before any of them makes a group.
    """
    global _generation, _default_groups, _sessions
    if dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            _keep_for_ever(group)
        dist.distributed_c10d._abort_process_group()
    _generation, _default_groups, _sessions = number, 0, 0


def make_groups(
    group_map: GroupMap, *, device: str, timeout_s: float, on_failure: Callable[[], None] | None = None
) -> dict[tuple[int, ...], TorchGroups]:
    """The torch groups of every list of more than one rank that holds this rank, keyed by the ordered list.

    Collective over all ranks of the map, which must be equal everywhere. Kinds with equal lists share their groups:
    identity is the ordered rank tuple. Lists of one rank need no group.
    on_failure: may raise a better story than torch's own, which names nobody.
    """
    me = dist.get_rank()
    timeout = timedelta(seconds=timeout_s + 5)  # above our own deadline, which can name the missing rank
    made: dict[tuple[int, ...], TorchGroups] = {}
    seen = set()
    for lists in group_map.groups.values():
        for ranks in lists:
            if len(ranks) == 1 or ranks in seen:
                continue
            seen.add(ranks)
            with _torch_waits(f"making the group of world ranks {list(ranks)}", me, on_failure):
                control = dist.new_group(list(ranks), backend="gloo", timeout=timeout)
                data = control if device == "cpu" else dist.new_group(list(ranks), backend="nccl", timeout=timeout)
            if me in ranks:
                made[ranks] = TorchGroups(control, data, device)
    return made


def _keep_for_ever(group: dist.ProcessGroup) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _connect(timeout: timedelta) -> dist.Store:
    global _base_store
    if _base_store is not None:
        return _base_store
    if not any(name in os.environ for name in _NEEDED):
        _base_store = dist.HashStore()  # a plain `python script.py`: a world of one rank
        return _base_store
    absent = [name for name in _NEEDED if not os.environ.get(name)]
    if absent:
        raise ArgumentError(
            f"no process group is initialised and {', '.join(absent)} is not set; start the script with "
            f"`torchrun --nproc-per-node N script.py`, or call torch.distributed.init_process_group first"
        )
    hosted_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    with _torch_waits(f"connecting to the job's store at {where} (MASTER_ADDR, MASTER_PORT)", _whole("RANK", 0)):
        _base_store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            _whole("MASTER_PORT", 0),
            world_size=_whole("WORLD_SIZE", 1),
            is_master=os.environ["RANK"] == "0" and not hosted_by_agent,
            timeout=timeout,
            wait_for_workers=False,
        )
    return _base_store


@contextlib.contextmanager
def _torch_waits(what: str, world_rank: int, on_failure: Callable[[], None] | None = None) -> Iterator[None]:
    """Add the story to what torch raises from its own waits, which name a store key at best."""
    try:
        yield
    except dist.DistError as e:
        if on_failure is not None:
            on_failure()
        raise DeadlineError(
            f"{what} on world rank {world_rank}: torch gave up: {e}; the other ranks may have given up before, or "
            f"never started: look at the first error of all ranks"
        ) from e


def _whole(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdigit():
        raise ArgumentError(f"{name}={text!r}; allowed: a whole number, as torchrun sets it")
    return int(text)
