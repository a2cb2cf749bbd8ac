"""A mapped file that loses its pages, as it is cut or its disk fails, does not end the program that writes it.

The kernel answers a write to a page that is gone with SIGBUS, which ends a process. While such a file is mapped, a
handler stands in front of whatever handled SIGBUS before: it puts plain memory in the place of the mapping, so that the
write succeeds and goes nowhere. Every other SIGBUS is handled as if it were not there.

A handler that a program puts in place later is asked first; faulthandler's asks this one in turn, after its report. One
that ends the process does so here too.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import weakref
from collections.abc import Callable

_SA_SIGINFO, _MAP_FIXED = 0x4, 0x10
_FAILED = ctypes.c_void_p(-1).value


class _SigAction(ctypes.Structure):
    """glibc's struct sigaction."""

    _fields_ = (
        *(("handler", ctypes.c_void_p), ("mask", ctypes.c_ubyte * 128)),
        *(("flags", ctypes.c_int), ("restorer", ctypes.c_void_p)),
    )


class _SigInfo(ctypes.Structure):
    """The head of siginfo_t, as it is of a fault."""

    _fields_ = (
        *(("number", ctypes.c_int), ("errno", ctypes.c_int), ("code", ctypes.c_int), ("_", ctypes.c_int)),
        ("address", ctypes.c_uint64),
    )


_watched: weakref.WeakKeyDictionary[mmap.mmap, tuple[int, weakref.WeakMethod[Callable[[], None]]]]
_watched = weakref.WeakKeyDictionary()  # where each mapping lies in memory, and whom to tell
_before, _in_place = _SigAction(), False
_libc = ctypes.PyDLL(None)  # keeps Python's lock: no other thread of Python runs while a mapping is replaced
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


def survive_lost_pages(mapped: mmap.mmap, tell: Callable[[], None]) -> None:
    """Until `forget_mapping`: if the file loses pages, put memory in their place and call the method `tell`. Local."""
    global _in_place
    if not _in_place:
        _libc.sigaction(signal.SIGBUS, ctypes.byref(_ours), ctypes.byref(_before))
        _in_place = True
    _watched[mapped] = ctypes.addressof(ctypes.c_char.from_buffer(mapped)), weakref.WeakMethod(tell)


def forget_mapping(mapped: mmap.mmap) -> None:
    """The mapping is about to be closed. After the last one SIGBUS is handled as it was before. Again is fine."""
    _watched.pop(mapped, None)
    now = _SigAction()
    _libc.sigaction(signal.SIGBUS, None, ctypes.byref(now))
    if not _watched and now.handler == _ours.handler:  # else ours is behind another one, which still calls it
        _step_back()


def _handle(_number: int, info: int, _context: int) -> None:
    """Runs in the thread that wrote, in the middle of its write, which is done again afterwards."""
    fault = _SigInfo.from_address(info)
    try:
        is_ours = _replace_lost(fault.address)
    except Exception:  # whatever it is: the write would come back here for ever
        is_ours = False
    if not is_ours:
        _step_back()
        if fault.code <= 0:  # sent by a process, so it will not come again by itself
            os.kill(os.getpid(), signal.SIGBUS)


def _replace_lost(address: int) -> bool:
    """Replace the mapping that holds it, and those of shorter files: a handler in between hides the address."""
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    replaced = False
    for mapped, (start, tell) in list(_watched.items()):
        length = len(mapped)
        if not (start <= address < start + length or mapped.size() < length):
            continue
        if _libc.mmap(start, length, protection, flags, -1, 0) == _FAILED:
            continue
        replaced = True
        del _watched[mapped]
        told = tell()
        if told is not None:
            told()
    return replaced


def _step_back() -> None:
    global _in_place
    _libc.sigaction(signal.SIGBUS, ctypes.byref(_before), None)
    _in_place = False


_handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(_handle)
_ours = _SigAction(handler=ctypes.cast(_handler, ctypes.c_void_p).value, flags=_SA_SIGINFO)
