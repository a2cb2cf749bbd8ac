"""How a rank ends: the exception nobody caught, and its exit status."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

from workbench.observe.process import this_process
from workbench.observe.workers import telling
from workbench.trace import CallSite, Lane, Recorder

_told: list[BaseException] = []  # the latest exception that was recorded


def install(module: Any) -> None:
    """Called once torch.multiprocessing.spawn has been executed: it hands a rank's exception on and exits quietly."""
    wrap = module._wrap

    @functools.wraps(wrap)
    def recorded_wrap(fn: Callable[..., Any], *args: Any) -> Any:
        return wrap(telling(fn), *args)

    module._wrap = recorded_wrap


def record_endings() -> None:
    """Put the recording in front of whatever ends this process. Local; once a process."""
    hook, thread_hook, leave, leave_now = sys.excepthook, threading.excepthook, sys.exit, os._exit

    @functools.wraps(hook)
    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        this_process.exit_status, this_process.exit_by = (130 if isinstance(error, KeyboardInterrupt) else 1), ""
        tell_exception(error)
        hook(kind, error, trace)

    @functools.wraps(thread_hook)
    def thread_excepthook(args: Any) -> None:
        if args.exc_value is not None:
            tell_exception(args.exc_value, remark="in a thread")
        thread_hook(args)

    @functools.wraps(leave)
    def recorded_exit(status: Any = None) -> NoReturn:
        this_process.exit_status = status if isinstance(status, int) else 0 if status is None else 1
        this_process.exit_by = _sys_exit_words(status, sys._getframe().f_back) if this_process.exit_status else ""
        leave(status)

    @functools.wraps(leave_now)
    def recorded_exit_now(status: int) -> NoReturn:
        this_process.exit_status, this_process.exit_by = status, "os._exit"
        _close()
        leave_now(status)

    sys.excepthook, threading.excepthook = excepthook, thread_excepthook
    sys.exit, os._exit = recorded_exit, recorded_exit_now
    atexit.register(_close)


def tell_exception(error: BaseException, door: Lane | Recorder | None = None, *, remark: str = "") -> None:
    """Record an exception once, at the program's innermost line of its traceback, else at the line of the call."""
    if (_told and _told[-1] is error) or isinstance(error, SystemExit | GeneratorExit):
        return
    _told[:] = [error]
    recorder = this_process.recorder
    if not recorder.enabled:
        return
    site = None if door is not None else _innermost(error.__traceback__, recorder.inner_files)
    (door or recorder).instant("exception", error=f"{type(error).__name__}: {error}", site=site, remark=remark)


def _innermost(trace: TracebackType | None, inner_files: tuple[str, ...]) -> CallSite | None:
    found = None
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith(inner_files):
            found = CallSite(code.co_qualname, code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return found


def _sys_exit_words(status: Any, frame: FrameType | None) -> str:
    where = f" in {frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})" if frame is not None else ""
    return f"sys.exit{where}{f': {status}' if isinstance(status, str) else ''}"


def _close() -> None:
    from workbench.observe.works import stop_polling

    recorder = this_process.recorder
    if recorder.enabled:
        stop_polling()
        status = this_process.exit_status or 0
        by = f", {this_process.exit_by}" if this_process.exit_by else ""
        recorder.instant("exit", note=f"status={status}{by}")
        this_process.live = False
        recorder.close()
