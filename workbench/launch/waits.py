"""Waits that an interrupt ends: in a rank of a cluster, torch's blocking waits are polled from Python instead.

What blocks inside C++ answers no Ctrl-C until its own timeout, and a notebook would have to kill the rank. So here
  Work.wait                       on CPU tensors polls is_completed; for send and recv it waits in a thread
  Store.wait, get, multi_get      poll Store.check
  new_group, init_process_group   first poll the store until every rank has come; torch's own wait is short then
  monitored_barrier               waits in a thread
Object collectives, barriers and batches of sends go through Work.wait. What waits in C++ without passing here (the
reducer of DistributedDataParallel, functional collectives) ends at the deadline of its process group. On CUDA tensors
the wait is the device's: `gpu_waits` ends that.

An operation that was left by an interrupt still runs in gloo's threads; its group must not be used again. That is what
`calls` looks after, and what a rebuild mends.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from workbench.errors import DeadlineError
from workbench.runtime.members import ranks_text, wait_until
from workbench.runtime.process_group import default_store, next_store

T = TypeVar("T")
_POINT_TO_POINT = (12, 13, 14)  # c10d::OpType SEND, RECV, RECVANYSOURCE: their Work never reports completion
_SLOWEST_POLL_S = 0.002

_cpu_call = threading.local()  # .active while this thread is inside a call on CPU tensors
_work_wait: Callable[..., Any]
_installed = False


def poll_waits(timeout_s: float) -> None:
    """Replace the waits listed above in this process. Local; again is fine.

    timeout_s is how long new_group and init_process_group wait for ranks that do not come, where the call says nothing.
    """
    global _installed, _work_wait
    if _installed:
        return
    _installed = True
    _work_wait = dist.Work.wait
    dist.Work.wait = _wait_for_work  # type: ignore[method-assign,assignment]  # the point of this file
    for name in ("wait", "get", "multi_get"):
        setattr(dist.Store, name, _polled_store_call(name, getattr(dist.Store, name)))
    replace_in_torch("new_group", lambda original: _gathered_new_group(original, timeout_s))
    replace_in_torch("init_process_group", lambda original: _gathered_init(original, timeout_s))
    replace_in_torch(
        "monitored_barrier", lambda original: functools.wraps(original)(functools.partial(_beside, original))
    )


def replace_in_torch(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `make(original)` in the place of torch.distributed's function `name`, for torch's own calls too."""
    replacement = make(getattr(dist, name))
    setattr(dist, name, replacement)
    setattr(dist.distributed_c10d, name, replacement)


@contextlib.contextmanager
def cpu_call(on_cpu: bool) -> Iterator[None]:
    """Around a call: whether its tensors are on the CPU. Needed in a process that uses CUDA as well."""
    before = getattr(_cpu_call, "active", False)
    _cpu_call.active = on_cpu
    try:
        yield
    finally:
        _cpu_call.active = before


def _wait_for_work(work: dist.Work, timeout: timedelta | None = None) -> Any:
    """Work.wait, polled. On CUDA the original, which only makes the stream wait."""
    arguments = () if timeout is None else (timeout,)
    if _uses_cuda() and not getattr(_cpu_call, "active", False):
        return _work_wait(work, *arguments)
    if work._get_op_type() in _POINT_TO_POINT:  # type: ignore[attr-defined]  # not in torch's stubs
        return _beside(_work_wait, work, *arguments)
    deadline = time.monotonic() + timeout.total_seconds() if timeout else float("inf")
    pause = 20e-6
    while not work.is_completed():
        if time.monotonic() > deadline:
            return _work_wait(work, timedelta(milliseconds=1))  # torch's own words for it
        time.sleep(pause)
        pause = min(pause * 1.3, _SLOWEST_POLL_S)
    return _work_wait(work, *arguments)


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch's


def _beside(call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Make a blocking call in a thread of its own; an interrupt leaves it there, where nobody waits for it any more."""
    outcome: list[tuple[T | None, BaseException | None]] = []
    ended = threading.Event()

    def run() -> None:
        try:
            outcome.append((call(*args, **kwargs), None))
        except BaseException as e:  # whatever it is belongs to the caller, who is in another thread
            outcome.append((None, e))
        ended.set()

    threading.Thread(target=run, name="waits", daemon=True).start()
    ended.wait()
    result, error = outcome[0]
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # no error, so it is the call's


def _polled_store_call(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A call that blocks until keys are there: poll for them first, so that the call itself finds them."""

    @functools.wraps(original)
    def call(store: dist.Store, keys: str | Sequence[str], *args: Any) -> Any:
        wanted = [keys] if isinstance(keys, str) else list(keys)
        timeout: timedelta = args[0] if name == "wait" and args else store.timeout  # type: ignore[attr-defined]
        wait_until(
            lambda: bool(store.check(wanted)),
            timeout_s=timeout.total_seconds(),
            on_expiry=lambda: dist.DistStoreError(
                f"wait timeout after {timeout.total_seconds() * 1000:.0f}ms, keys: {', '.join(wanted)}"
            ),
        )
        return original(store, keys, *args)

    return call


def _gathered_new_group(original: Callable[..., Any], timeout_s: float) -> Callable[..., Any]:
    """new_group that starts once all ranks have come to it: all of the world, or the members if they alone make it."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        ranks = given.get("ranks")
        local = bool(given.get("use_local_synchronization")) and ranks is not None
        if not local or dist.get_rank() in (ranks or ()):
            members = sorted(ranks or ()) if local else range(dist.get_world_size())
            which = f"of{'.'.join(map(str, members))}" if local else "all"
            number = _count(f"new_group/{which}")
            timeout = given.get("timeout")
            arrive(
                default_store(),
                f"workbench/new_group/{which}/{number}",
                members,
                dist.get_rank(),
                timeout.total_seconds() if timeout else timeout_s,
                what=f"new_group({ranks})",
            )
        return original(*args, **kwargs)

    return new_group


def _gathered_init(original: Callable[..., Any], timeout_s: float) -> Callable[..., Any]:
    """init_process_group that, if given no store and no address, meets under a prefix no earlier group has used.

    torch's own would find the keys of the group before it in the agent's store, and hang.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if given.get("store") is not None or given.get("init_method") not in (None, "env://"):
            return original(*args, **kwargs)
        timeout = given.get("timeout")
        seconds = timeout.total_seconds() if timeout else timeout_s
        given.pop("init_method", None)
        given["store"] = store = next_store(timedelta(seconds=seconds))
        given["rank"], given["world_size"] = rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        given["timeout"] = timedelta(seconds=seconds)
        arrive(store, "arrived", range(size), rank, seconds, what="init_process_group")
        return original(**given)

    return init_process_group


def arrive(
    store: dist.Store, prefix: str, members: Sequence[int], world_rank: int, timeout_s: float, *, what: str
) -> None:
    """Say in the store that this rank has come, and wait for the other members.

    One that gives up takes its word back, so that nobody who comes later waits for it in C++.
    Raises: DeadlineError naming the world ranks that did not come.
    """
    keys = {r: f"{prefix}/{r}" for r in members}
    store.set(keys[world_rank], "here")

    def late() -> DeadlineError:
        missing = tuple(r for r, key in keys.items() if not store.check([key]))
        return DeadlineError(
            f"{what}: world rank {world_rank} waited {timeout_s:g} s for {ranks_text(missing)}, which did not call it",
            missing=missing,
        )

    try:
        wait_until(lambda: bool(store.check(list(keys.values()))), timeout_s=timeout_s, on_expiry=late)
    except BaseException:
        store.delete_key(keys[world_rank])
        raise


_counts: dict[str, int] = {}
_counted_in: Any = None


def _count(name: str) -> int:
    """1, 2, 3 ... for each name, from the start again in each default group."""
    global _counted_in
    if _counted_in is not dist.group.WORLD:
        _counted_in = dist.group.WORLD
        _counts.clear()
    _counts[name] = _counts.get(name, 0) + 1
    return _counts[name]
