"""The CUDA kernels' C face (kernels_ext/include/wbk/cuda_abi.h) through ctypes, and the memory one rank owns.

Nothing here imports the rest of the package, so programs that measure kernels can load this file alone.
"""

from __future__ import annotations

import ctypes as c
import os
from dataclasses import dataclass
from pathlib import Path

MAX_RANKS = 16
BF16, FP16, FP32 = 0, 1, 2
ALL_REDUCE, ADD_NORM = 1, 2
PUSH, TWO_SHOT_PUSH = 0, 1
IPC, FD, FABRIC = 0, 1, 2
TRIGGER_AT_START, TRIGGER_AFTER_PUSH, TRIGGER_AFTER_POLL, TRIGGER_NEVER = 0, 1, 2, 3
_ABI = 2


class KernelError(RuntimeError):
    """A call into the kernels' library that was refused; the text is the library's."""


class Report(c.Structure):
    """What a kernel that gave up says: who waited (rank), for whom (peer), for which row of which lane (epoch)."""

    _fields_ = [
        (name, c.c_uint32) for name in ("valid", "op", "group", "rank", "peer", "row", "epoch", "expected", "seen")
    ] + [("reserved", c.c_uint32 * 7)]


class RankMemory(c.Structure):
    _fields_ = [(name, c.c_void_p) for name in ("x", "residual", "sum", "norm", "control", "report")]


class Call(c.Structure):
    _fields_ = [
        *((name, c.c_uint32) for name in ("op", "dtype", "ranks", "first_rank", "virtual_ranks")),
        *((name, c.c_uint32) for name in ("tokens", "hidden", "plane_rows")),
        *((name, c.c_uint32) for name in ("algorithm", "cluster", "max_lanes", "trigger")),
        *((name, c.c_uint32) for name in ("round_twice", "group", "pdl", "reserved")),
        ("eps", c.c_float),
        ("weight_bias", c.c_float),
        ("timeout_ns", c.c_uint64),
        ("weight", c.c_void_p),
        ("slots", c.c_void_p * MAX_RANKS),
        ("rank", RankMemory * MAX_RANKS),
    ]


class Handle(c.Structure):
    """How a peer finds shared memory: bytes that travel (IPC, FABRIC), or a file descriptor of this process (FD)."""

    _fields_ = [("bytes", c.c_ubyte * 64), ("fd", c.c_int32)]


@dataclass(frozen=True, slots=True)
class Choice:
    """How a call is laid on the device: blocks a row (2..16), rows at one time at most (0: as many as fit), trigger."""

    cluster: int
    max_lanes: int = 0
    trigger: int = TRIGGER_AFTER_PUSH
    algorithm: int = PUSH


ALLOCATION_BYTES = 2 << 20  # a handle names a whole unit of allocation, not an offset in it

# Sizes of a message, tokens * hidden * itemsize, at which the best layout changes.
FEW_BYTES, MANY_BYTES = 2 << 20, 16 << 20
SHORT_ROW_BYTES, SHORT_ROWS_FEW_BYTES = 8 << 10, 1 << 20
IN_FLIGHT_BYTES = 100 * 7168 * 2

# Two shots move 2(n-1)/n of a message over each link where push moves n-1, and wait once more: 0.9 us at 363 GB/s.
SECOND_WAIT_BYTES = 326_700


def choose(tokens: int, hidden: int, itemsize: int, ranks: int = 2, algorithm: int | None = None) -> Choice:
    """Blocks of 128 threads, two to eight a row; blocks of 256 for many short rows; in between fewer rows at one time.

    Measured on two H200s from 1 to 4,096 tokens at hidden 4096 (short rows) and 7168; see kernels_ext/cuda/README.md.
    Unless `algorithm` says which, two shots for more than two ranks and large messages: from the cost model above, not
    measured.
    """
    row_bytes = hidden * itemsize
    message_bytes = tokens * row_bytes
    if algorithm is None:
        pays = ranks > 2 and tokens >= ranks and message_bytes > push_bytes(ranks)
        algorithm = TWO_SHOT_PUSH if pays else PUSH
    short = row_bytes <= SHORT_ROW_BYTES
    threads = 256 if short and message_bytes > SHORT_ROWS_FEW_BYTES else 128
    limited = not short and algorithm == PUSH and FEW_BYTES < message_bytes <= MANY_BYTES
    return Choice(
        cluster=max(2, min(8, -(-row_bytes // (16 * threads)))),
        max_lanes=IN_FLIGHT_BYTES // row_bytes if limited else 0,
        algorithm=algorithm,
    )


def push_bytes(ranks: int) -> int:
    """The largest message for which push beats two shots by the cost model; ranks above 2."""
    return SECOND_WAIT_BYTES * ranks // ((ranks - 1) * (ranks - 2))


def clusters(hidden: int, itemsize: int) -> tuple[int, ...]:
    """Every cluster size that `choose` gives for such rows."""
    return tuple(sorted({choose(tokens, hidden, itemsize).cluster for tokens in (1, MANY_BYTES)}))


def plane_rows(tokens: int, hidden: int, itemsize: int, ranks: int, algorithm: int | None = None) -> int:
    """Rows of a sender's plane that hold every call of up to `tokens` tokens, by the algorithm `choose` gives it."""
    if algorithm is None and ranks > 2:
        pushed = min(tokens, max(push_bytes(ranks) // (hidden * itemsize), ranks - 1))
        return max(pushed, two_shot_rows(tokens, ranks), 1)
    return max(two_shot_rows(tokens, ranks) if algorithm == TWO_SHOT_PUSH else tokens, 1)


def two_shot_rows(tokens: int, ranks: int) -> int:
    """Rows of a sender's plane that a two-shot call uses."""
    return 2 * -(-tokens // ranks)


def slot_bytes(rows: int, hidden: int, itemsize: int, ranks: int) -> int:
    """Bytes of one rank's slots: two halves, a plane a peer, in whole allocation units."""
    return -(-2 * (ranks - 1) * rows * hidden * itemsize // ALLOCATION_BYTES) * ALLOCATION_BYTES


class Kernels:
    """The loaded library. Methods raise KernelError; sizes are bytes where the name says so."""

    def __init__(self, path: str | Path) -> None:
        self.lib = lib = c.CDLL(str(path))
        self.path = str(path)
        for name, result, arguments in (
            ("wbk_cuda_abi", c.c_int, ()),
            ("wbk_cuda_call_bytes", c.c_uint64, ()),
            ("wbk_cuda_error_text", c.c_char_p, (c.c_int,)),
            ("wbk_cuda_slot_bytes", c.c_uint64, (c.c_uint32,) * 4),
            ("wbk_cuda_control_bytes", c.c_uint64, ()),
            ("wbk_cuda_resident_lanes", c.c_int, (c.c_void_p, c.c_void_p)),
            ("wbk_cuda_push", c.c_int, (c.c_void_p, c.c_void_p)),
            ("wbk_cuda_alloc", c.c_int, (c.c_int, c.c_uint64, c.c_int, c.c_void_p)),
            ("wbk_cuda_free", c.c_int, (c.c_int, c.c_void_p)),
            ("wbk_cuda_shared_alloc", c.c_int, (c.c_int, c.c_uint32, c.c_uint64, c.c_int, c.c_void_p, c.c_void_p)),
            ("wbk_cuda_shared_free", c.c_int, (c.c_int, c.c_uint32, c.c_uint64, c.c_void_p)),
            ("wbk_cuda_shared_open", c.c_int, (c.c_int, c.c_uint32, c.c_uint64, c.c_void_p, c.c_void_p)),
            ("wbk_cuda_shared_close", c.c_int, (c.c_int, c.c_uint32, c.c_uint64, c.c_void_p)),
            ("wbk_cuda_host_alloc", c.c_int, (c.c_uint64, c.c_void_p, c.c_void_p)),
            ("wbk_cuda_host_free", c.c_int, (c.c_void_p,)),
            ("wbk_cuda_device", c.c_int, (c.c_int, c.c_void_p, c.c_void_p, c.c_char_p)),
            ("wbk_cuda_can_reach", c.c_int, (c.c_int, c.c_int, c.c_void_p)),
            ("wbk_cuda_delay", c.c_int, (c.c_uint64, c.c_void_p)),
        ):
            function = getattr(lib, name)
            function.restype, function.argtypes = result, list(arguments)
        if lib.wbk_cuda_abi() != _ABI or lib.wbk_cuda_call_bytes() != c.sizeof(Call):
            raise KernelError(f"{path} has another ABI than this package: build it again")

    def ok(self, code: int) -> None:
        if code:
            raise KernelError(f"{self.lib.wbk_cuda_error_text(code).decode()} (code {code})")

    def push(self, call: Call, stream: int) -> None:
        self.ok(self.lib.wbk_cuda_push(c.byref(call), stream))

    def resident_lanes(self, call: Call) -> int:
        lanes = c.c_uint32()
        self.ok(self.lib.wbk_cuda_resident_lanes(c.byref(call), c.byref(lanes)))
        return lanes.value

    def delay(self, ns: int, stream: int) -> None:
        self.ok(self.lib.wbk_cuda_delay(ns, stream))

    def device(self, index: int) -> tuple[int, int, str]:
        """Multiprocessors, compute capability (90 for 9.0) and UUID of a device."""
        sms, arch, uuid = c.c_int(), c.c_int(), c.create_string_buffer(16)
        self.ok(self.lib.wbk_cuda_device(index, c.byref(sms), c.byref(arch), uuid))
        return sms.value, arch.value, uuid.raw.hex()

    def can_reach(self, device: int, peer: int) -> bool:
        yes = c.c_int()
        self.ok(self.lib.wbk_cuda_can_reach(device, peer, c.byref(yes)))
        return bool(yes.value)

    def alloc(self, device: int, size_bytes: int, fill: int) -> int:
        """Memory of this process alone."""
        address = c.c_void_p()
        self.ok(self.lib.wbk_cuda_alloc(device, size_bytes, fill, c.byref(address)))
        return int(address.value or 0)

    def free(self, device: int, address: int) -> None:
        self.ok(self.lib.wbk_cuda_free(device, address))

    def shared_alloc(self, device: int, share: int, size_bytes: int, fill: int) -> tuple[int, Handle]:
        """Memory that peers can map, filled, and its handle."""
        address, handle = c.c_void_p(), Handle()
        self.ok(self.lib.wbk_cuda_shared_alloc(device, share, size_bytes, fill, c.byref(address), c.byref(handle)))
        return int(address.value or 0), handle

    def shared_free(self, device: int, share: int, size_bytes: int, address: int) -> None:
        self.ok(self.lib.wbk_cuda_shared_free(device, share, size_bytes, address))

    def open(self, device: int, share: int, size_bytes: int, handle: Handle) -> int:
        """A peer's memory, mapped here."""
        address = c.c_void_p()
        self.ok(self.lib.wbk_cuda_shared_open(device, share, size_bytes, c.byref(handle), c.byref(address)))
        return int(address.value or 0)

    def close(self, device: int, share: int, size_bytes: int, address: int) -> None:
        self.ok(self.lib.wbk_cuda_shared_close(device, share, size_bytes, address))


class OwnMemory:
    """What one rank of one group owns: slots that peers write, control words, and the host-mapped report.

    Slots are filled with ones (the sentinel) and the rest with zeros before this returns. Local; nothing is shared yet.
    share: how peers will map the slots (IPC, FD, FABRIC).
    """

    def __init__(
        self, kernels: Kernels, device: int, *, ranks: int, rows: int, hidden: int, dtype: int, share: int = IPC
    ) -> None:
        self.kernels, self.device, self.share = kernels, device, share
        self.slots = self.control = self.host = 0
        self.handle = Handle(fd=-1)
        lib = kernels.lib
        slots = lib.wbk_cuda_slot_bytes(ranks, rows, hidden, dtype)
        self.size_bytes = -(-slots // ALLOCATION_BYTES) * ALLOCATION_BYTES
        try:
            self.slots, self.handle = kernels.shared_alloc(device, share, self.size_bytes, 0xFF)
            self.control = kernels.alloc(device, lib.wbk_cuda_control_bytes(), 0)
            host, seen = c.c_void_p(), c.c_void_p()
            kernels.ok(lib.wbk_cuda_host_alloc(c.sizeof(Report), c.byref(host), c.byref(seen)))
            self.host, self.report_address = int(host.value or 0), int(seen.value or 0)
        except KernelError:
            self.free()
            raise
        self.report = Report.from_address(self.host)

    def fill(self, memory: RankMemory) -> None:
        memory.control, memory.report = self.control, self.report_address

    def close_descriptor(self) -> None:
        """Close the descriptor of FD memory, once every peer has its own copy."""
        if self.handle.fd >= 0:
            os.close(self.handle.fd)
            self.handle.fd = -1

    def free(self) -> None:
        """Give everything back; once. IPC memory: only after every peer has closed it."""
        self.close_descriptor()
        if self.slots:
            self.kernels.shared_free(self.device, self.share, self.size_bytes, self.slots)
        if self.control:
            self.kernels.free(self.device, self.control)
        if self.host:
            self.kernels.ok(self.kernels.lib.wbk_cuda_host_free(self.host))
        self.slots = self.control = self.host = 0

    def open_peer(self, told: bytes, fd: int = -1) -> int:
        """The slots of a peer, as large as the own ones, by the bytes of its handle or a descriptor of this process."""
        handle = Handle(fd=fd)
        handle.bytes[:] = told
        return self.kernels.open(self.device, self.share, self.size_bytes, handle)

    def close_peer(self, address: int) -> None:
        self.kernels.close(self.device, self.share, self.size_bytes, address)
