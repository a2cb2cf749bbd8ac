"""Calls on a GPU: Python returns once they are enqueued, so each stays open until the device has come past it.

A CUDA event is put behind the call, on the stream that waits for it, and a thread looks at it a few times a second. A
call that the device is past by then ends when Python returned from it, so its record lasts as long as it took the
host. One that is held up is under way for all to see; it ends when the device is past it, up to 0.2 s late.

The thread asks CUDA's driver itself, without Python's lock, so a driver that is busy holds up nobody else; and it asks
in a mode in which that is allowed while another thread captures a graph.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from workbench.trace.lane_writer import Lane, Token
from workbench.trace.recorder import Recorder

_LOOK_S = 0.2
_DONE, _NOT_READY, _RELAXED = 0, 600, 2  # CUDA_SUCCESS, CUDA_ERROR_NOT_READY, CU_STREAM_CAPTURE_MODE_RELAXED


@dataclass(frozen=True, slots=True)
class _Behind:
    """A call, and the event that the device comes past after it."""

    event: Any
    door: Lane | Recorder
    token: Token
    returned_ns: int


_streams: dict[tuple[int, int], deque[_Behind]] = {}  # by device and stream; of each, in the order of the calls
_wake, _leaving, _ending = threading.Event(), threading.Event(), threading.Lock()
_thread: threading.Thread | None = None


def end_after_device(door: Lane | Recorder, token: Token | None, device: Any) -> None:
    """End the call that gave `token` once `device` is past what its current stream holds now. Local; returns at once.

    A call that is captured ends here: the event would be part of the graph. So does one whose device has failed.
    """
    import torch

    if token is None:
        return
    try:
        if torch.cuda.is_current_stream_capturing():
            door.end(token)
            return
        stream = torch.cuda.current_stream(device)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
        event.record(stream)
    except RuntimeError as e:
        door.end(token, error=f"{type(e).__name__}: {e}")
        return
    calls = _streams.setdefault((stream.device_index, stream.cuda_stream), deque())
    calls.append(_Behind(event, door, token, time.monotonic_ns()))
    _start()
    _wake.set()


def end_passed_calls() -> bool:
    """End the calls that the device is past; True while others are under way. Local."""
    with _ending:
        for calls in list(_streams.values()):
            while calls:
                state = _query(calls[0].event)
                if state == _NOT_READY:
                    break
                call = calls.popleft()
                was_held_up = time.monotonic_ns() - call.returned_ns > 2 * _LOOK_S * 1e9
                error = "" if state == _DONE else f"CUDA error {state} on the device"
                call.door.end(call.token, error=error, time_ns=0 if was_held_up else call.returned_ns)
        return any(_streams.values())


def allow_looks_during_captures() -> None:
    """Let this thread ask for the state of events while another captures a graph. Local; without a GPU nothing."""
    driver = _driver()
    if driver is not None:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _start() -> None:
    global _thread
    if _thread is None:
        _thread = threading.Thread(target=_look_on, name="workbench-gpu-calls", daemon=True)
        _thread.start()
        atexit.register(_stop)


def _look_on() -> None:
    allow_looks_during_captures()
    while not _leaving.is_set():
        _wake.wait()
        _wake.clear()
        while end_passed_calls() and not _leaving.wait(_LOOK_S):
            pass


def _query(event: Any) -> int:
    """The driver's answer, without Python's lock."""
    driver = _driver()
    assert driver is not None, "an event of CUDA without its driver"
    return int(driver.cuEventQuery(ctypes.c_void_p(event.cuda_event)))


def _stop() -> None:
    _leaving.set()
    _wake.set()
    if _thread is not None:
        _thread.join(timeout=5)
        end_passed_calls()


def _forget() -> None:
    """In a forked child: the calls under way are its parent's."""
    global _thread, _wake, _leaving, _ending
    _streams.clear()
    _thread, _wake, _leaving, _ending = None, threading.Event(), threading.Event(), threading.Lock()


os.register_at_fork(after_in_child=_forget)
