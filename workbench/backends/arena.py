"""Arena: tensors over one piece of shared memory, given back when the last tensor over a block is garbage."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque
from math import prod

import torch

from workbench.errors import CapacityError

ALIGNMENT = 64  # bytes: a cache line, and what torch's own allocator gives


class Arena:
    """First-fit blocks of `memory[offset : offset + size_bytes]`. One thread allocates; any thread may free."""

    def __init__(self, memory: mmap.mmap, *, offset: int, size_bytes: int, name: str) -> None:
        self._memory = memory
        self._offset = offset
        self._size_bytes = size_bytes
        self._name = name
        self._taken: list[tuple[int, int]] = []  # (start, end), sorted, relative to offset
        self._returned: deque[tuple[int, int]] = deque()  # by finalizers, in whatever thread

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor over a free block. Raises CapacityError with the bytes asked, free and in all."""
        count = prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        size = count * dtype.itemsize
        start = self._take(size)
        block = (ctypes.c_char * size).from_buffer(self._memory, self._offset + start)
        weakref.finalize(block, self._returned.append, (start, start + size)).atexit = False
        return torch.frombuffer(block, dtype=dtype, count=count).view(shape)

    def _take(self, size: int) -> int:
        while self._returned:
            self._taken.remove(self._returned.popleft())
        start, largest = 0, 0
        for index, (taken_start, taken_end) in enumerate([*self._taken, (self._size_bytes, 0)]):
            if taken_start - start >= size:
                self._taken.insert(index, (start, start + size))
                return start
            largest = max(largest, taken_start - start)
            start = -(-taken_end // ALIGNMENT) * ALIGNMENT
        in_use = sum(end - begin for begin, end in self._taken)
        raise CapacityError(
            f"{self._name}: {size} bytes asked of memory that peers read in place; largest free block {largest} bytes, "
            f"{in_use} of {self._size_bytes} bytes in use; drop tensors from empty(), or prepare more tokens"
        )
