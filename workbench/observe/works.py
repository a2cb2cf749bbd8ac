"""Calls that were only started: each ends when the program's wait returns, or when it is seen to have completed."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.observe.process import this_process
from workbench.trace import Lane, Recorder, Token, allow_looks_during_captures, end_passed_calls

ON_GPU = "on the GPU"
"""A word in the note of a call that a GPU is to do: it is under way until its end, whoever waits for it and where."""

BY_FUTURE = "by its future"
"""A word in the note of a wait that began when a program took the future of a call, and ends with that call."""

ASKING = "by asking again and again"
"""A word in the note of a wait of a program that does nothing but ask a call whether it has completed."""

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


@dataclass(slots=True)
class _Asking:
    """A program that asks a call whether it has completed: since when, when last; the wait, once it counts as one."""

    since: float
    last: float
    wait: Token | None = None

    def end_wait(self) -> None:
        if self.wait is not None:
            this_process.recorder.end(self.wait)
            self.wait = None


_started: dict[Any, _Started] = {}  # by Work, which is kept until its call has ended
_polled: set[Any] = set()
_asking: dict[Any, _Asking] = {}
_wake, _leaving = threading.Event(), threading.Event()
_poller: threading.Thread | None = None
_unwatched: Any = None  # the class of Works, until the recording is in it
_ask: Any = None  # its own is_completed
_watching, _asks = threading.Lock(), threading.RLock()


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
                _note_asking(work, started)
        return result

    return recorded_is_completed


def _note_asking(work: Any, started: _Started) -> None:
    """A loop around is_completed is a wait too, as long as it goes on."""
    now = time.monotonic()
    with _asks:
        asking = _asking.setdefault(work, _Asking(now, now))
        if now - asking.last > _ASKS_AGAIN_S:
            asking.end_wait()
            asking.since = now
        asking.last = now
        if asking.wait is None and now - asking.since > _WAITS_S:
            asking.wait = this_process.recorder.begin("wait", note=f"for {started.text}", remark=ASKING)
            start_polling()


def _end_asking(work: Any, *, unless_since: float = float("inf")) -> None:
    with _asks:
        asking = _asking.get(work)
        if asking is not None and asking.last < unless_since:
            asking.end_wait()
            del _asking[work]


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
    global _poller, _wake, _leaving, _watching, _asks
    _started.clear()
    _polled.clear()
    _asking.clear()
    _poller, _wake, _leaving = None, threading.Event(), threading.Event()
    _watching, _asks = threading.Lock(), threading.RLock()


def _end(work: Any, error: str = "") -> None:
    _polled.discard(work)
    _end_asking(work)
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
        while (_polled or _asking) and not _leaving.wait(_POLL_S):
            end_completed()
            _end_what_nobody_asks()


def end_completed() -> None:
    """End the calls whose Work says that it has completed."""
    for work in list(_polled):
        if _ask(work):
            _end(work)


def _end_what_nobody_asks() -> None:
    for work in list(_asking):
        _end_asking(work, unless_since=time.monotonic() - _ASKS_AGAIN_S)


def stop_polling() -> None:
    """Before the interpreter ends: a thread caught inside C++ then would abort the process."""
    end_completed()
    end_passed_calls()
    _leaving.set()
    _wake.set()
    if _poller is not None and _poller is not threading.current_thread():
        _poller.join(timeout=5)


os.register_at_fork(after_in_child=forget_works)
