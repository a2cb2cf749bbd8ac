"""The compiled CPU kernels as Python sees them: kernels_ext/include/wbk/abi.h, line for line, through ctypes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path

import torch

from workbench.errors import ResourceError
from workbench.ops import Op, Rounding

ABI_VERSION = 1
MAX_RANKS = 16
DTYPE_CODES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
ROUNDING_CODES = {Rounding.ONCE: 0, Rounding.TWICE: 1}
OP_CODES = {Op.ALL_REDUCE: 0, Op.ALL_REDUCE_ADD_RMS_NORM: 1}


class Status(IntEnum):
    """What a call gives back."""

    OK = 0
    AGAIN = 1
    FAILED = 2
    BUSY = 3
    INVALID = 4


class Cause(IntEnum):
    """Why a rank left its group."""

    IN_GROUP = 0
    CLOSED = 1
    INTERRUPTED = 2
    MISMATCH = 3
    DEADLINE = 4
    PEER_DEAD = 5


class CallWords(Structure):
    _fields_ = (
        ("op", c_uint32),
        ("dtype", c_uint32),
        ("rounding", c_uint32),
        ("hidden", c_uint32),
        ("tokens", c_uint64),
        ("eps", c_float),
        ("weight_bias", c_float),
    )


class Failure(Structure):
    _fields_ = (
        ("cause", c_uint32),
        ("reporter", c_uint32),
        ("other", c_uint32),
        ("reserved", c_uint32),
        ("mask", c_uint64),
        ("epoch", c_uint64),
        ("reporter_call", CallWords),
        ("other_call", CallWords),
    )


class Layout(Structure):
    _fields_ = tuple(
        (name, c_uint64)
        for name in (
            "segment_bytes",
            "slots_offset",
            "slot_bytes",
            "rows_per_slot",
            "num_slots",
            "arena_offset",
            "arena_bytes",
        )
    )


class Config(Structure):
    _fields_ = (
        ("abi_version", c_uint32),
        ("num_ranks", c_uint32),
        ("group_rank", c_uint32),
        ("dtype", c_uint32),
        ("rounding", c_uint32),
        ("hidden", c_uint32),
        ("num_spins", c_uint32),
        ("num_yields", c_uint32),
        ("arena_bytes", c_uint64),
        ("timeout_ns", c_int64),
        ("slice_ns", c_int64),
        ("segments", c_void_p * MAX_RANKS),
    )


_FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    "wbk_abi_version": (c_uint32, []),
    "wbk_layout_of": (c_int, [c_uint32, c_uint32, c_uint64, POINTER(Layout)]),
    "wbk_format_segment": (None, [c_void_p, POINTER(Layout), c_uint32, c_uint32]),
    "wbk_check_segment": (c_int, [c_void_p, POINTER(Layout), c_uint32, c_uint32]),
    "wbk_open": (c_void_p, [POINTER(Config)]),
    "wbk_close": (None, [c_void_p]),
    "wbk_all_reduce": (c_int, [c_void_p, c_uint64, c_void_p, c_void_p]),
    "wbk_all_reduce_add_rms_norm": (c_int, [c_void_p, c_uint64, *[c_void_p] * 5, c_float, c_float]),
    "wbk_resume": (c_int, [c_void_p]),
    "wbk_leave": (None, [c_void_p, c_uint32, c_uint64]),
    "wbk_failure_of": (None, [c_void_p, POINTER(Failure)]),
    "wbk_missing": (c_uint64, [c_void_p]),
}


@cache
def load_library(path: Path) -> ctypes.CDLL:
    """The kernels at `path` with every function declared. Calls release the interpreter lock.

    Raises: ResourceError if the object cannot be loaded or speaks another version.
    """
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
    except (OSError, AttributeError) as e:
        raise ResourceError(f"{path} cannot be loaded: {e}; remove it and try again") from e
    version = library.wbk_abi_version()
    if version != ABI_VERSION:
        raise ResourceError(f"{path} has interface version {version}, needed {ABI_VERSION}; remove it and try again")
    return library
