"""Calls that were only started: each ends when the program's wait returns, or when it is seen to have completed."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.observe.asking import asked
from workbench.observe.process import this_process
from workbench.trace import BY_FUTURE, Lane, Recorder, Token, allow_looks_during_captures, end_passed_calls

_POLL_S = 0.02
_ASKS_AGAIN_S = 0.25  # a program that asks less often does something else in between
_WAITS_S = 1.0  # of asking without a pause: then it is a wait


@dataclass(frozen=True, slots=True)
class _Started:
    """A call under way: where its end belongs, and what a wait for it is to be called. others: that end with it."""

    door: Lane | Recorder
    token: Token | None
    text: str
    on_gpu: bool
    others: list[tuple[Lane | Recorder, Token | None, str]]

    def end(self, error: str) -> None:
        self.door.end(self.token, error=error)
        for door, token, _ in self.others:
            door.end(token, error=error)


_started: dict[Any, _Started] = {}  # by Work, which is kept until its call has ended
_polled: set[Any] = set()
_wake, _leaving = threading.Event(), threading.Event()
_poller: threading.Thread | None = None
_unwatched: Any = None  # the class of Works, until the recording is in it
_ask: Any = None  # its own is_completed
_watching = threading.Lock()


def start_work(
    work: Any,
    door: Lane | Recorder,
    token: Token | None,
    op: str,
    *,
    polled: bool,
    on_gpu: bool = False,
    others: Sequence[tuple[Lane | Recorder, Token | None, str]] = (),
) -> None:
    """Remember a call that returned a Work. `polled`: ask the Work itself whether it has completed.

    Sends and receives between CPUs never say so. `on_gpu`: a wait returns before the Work is done. `others`: calls
    for which the Work stands too.
    """
    if _unwatched is not None:
        _watch_waits()
    group = f" on {door.info.key}" if isinstance(door, Lane) and door.info is not None else ""
    number = f" #{token[1]}" if token is not None and group else ""
    more = f" and {len(others)} more" if others else ""
    started = _Started(door, token, f"{op}{number}{group}{more}", on_gpu, list(others))
    try:
        _started[work] = started
    except TypeError:  # no Work, but whatever stands for one
        started.end("")
        return
    if polled:
        _polled.add(work)
        start_polling()


def record_work_waits(work_class: Any) -> None:
    """Have the waits for Works of this class recorded, from the first call on that is only started.

    Not before: every other call waits for a Work too, inside torch, and would pay for the look.
    """
    global _unwatched, _ask
    _unwatched, _ask = work_class, work_class.is_completed


def _watch_waits() -> None:
    """Put the recording into what waits for a Work, asks for its end, or hands it on to who does."""
    global _unwatched
    with _watching:
        if _unwatched is not None:
            _unwatched.wait = _recorded_wait(_unwatched.wait)
            _unwatched.is_completed = _recorded_is_completed(_unwatched.is_completed)
            _unwatched.get_future = _recorded_get_future(_unwatched.get_future)
            _unwatched = None


def _recorded_wait(wait: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(wait)
    def recorded_wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        started = _started.get(work) if _started else None
        if started is None:
            return wait(work, *args, **kwargs)
        recorder = this_process.recorder
        token = recorder.begin("wait", note=f"for {started.text}")
        try:
            result = wait(work, *args, **kwargs)
        except BaseException as e:
            error = f"{type(e).__name__}: {e}"
            recorder.end(token, error=error)
            _end(work, error)
            from workbench.observe.endings import tell_exception

            tell_exception(e)
            raise
        recorder.end(token)
        if not started.on_gpu:
            _end(work)
        return result

    return recorded_wait


def _recorded_is_completed(is_completed: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(is_completed)
    def recorded_is_completed(work: Any) -> Any:
        result = is_completed(work)
        if _started and (started := _started.get(work)) is not None:
            if result:
                _end(work)
            else:
                asked.note(work, _ASKS_AGAIN_S)
                asked.count(work, "wait", note=f"for {started.text}", after_s=_WAITS_S)
                start_polling()
        return result

    return recorded_is_completed


def _recorded_get_future(get_future: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Whoever waits for a future is not seen; C++ does, where the hooks of DistributedDataParallel give it theirs."""

    @functools.wraps(get_future)
    def recorded_get_future(work: Any) -> Any:
        started = _started.get(work) if _started else None
        if started is not None and not started.on_gpu and not any(op == "wait" for _, _, op in started.others):
            recorder = this_process.recorder
            token = recorder.begin("wait", note=f"for {started.text}", remark=f"async; {BY_FUTURE}")
            started.others.append((recorder, token, "wait"))
        return get_future(work)

    return recorded_get_future


def forget_works() -> None:
    """In a forked child: the calls under way are its parent's."""
    global _poller, _wake, _leaving, _watching
    _started.clear()
    _polled.clear()
    _poller, _wake, _leaving = None, threading.Event(), threading.Event()
    _watching = threading.Lock()


def _end(work: Any, error: str = "") -> None:
    _polled.discard(work)
    asked.end(work)
    started = _started.pop(work, None)
    if started is not None:
        started.end(error)


def start_polling() -> None:
    """Have a thread look for calls that complete, as long as there are any."""
    global _poller
    if _poller is None:
        _poller = threading.Thread(target=_poll, name="workbench-works", daemon=True)
        _poller.start()
    _wake.set()


def _poll() -> None:
    allow_looks_during_captures()
    while not _leaving.is_set():
        _wake.wait()
        _wake.clear()
        while (_polled or asked) and not _leaving.wait(_POLL_S):
            end_completed()
            asked.end_what_nobody_asks()


def end_completed() -> None:
    """End the calls whose Work says that it has completed."""
    for work in list(_polled):
        if _ask(work):
            _end(work)


def stop_polling() -> None:
    """Before the interpreter ends: a thread caught inside C++ then would abort the process."""
    end_completed()
    end_passed_calls()
    asked.end_what_nobody_asks(leaving=True)
    _leaving.set()
    _wake.set()
    if _poller is not None and _poller is not threading.current_thread():
        _poller.join(timeout=5)


os.register_at_fork(after_in_child=forget_works)
