"""A driver of two devices in this process's memory, for the probe that writes into a peer's memory and reads it."""

from __future__ import annotations

import ctypes as c
from typing import Any

from workbench.runtime.cuda_probe import SEEDED, WRITTEN, Driver, ProbeError, words

DEVICES = ("GPU-0", "GPU-1")


class FakeDriver(Driver):
    """offers: what the driver says of peer access.   lost: writes never arrive.   flips: a bit flips on the way."""

    def __init__(self, *, offers: bool = True, lost: bool = False, flips: bool = False) -> None:
        self.ordinals = {device: i for i, device in enumerate(DEVICES)}
        self._offers, self._lost, self._flips = offers, lost, flips
        self._memory: dict[int, list[int]] = {}

    def enter(self, device: str) -> c.c_void_p:
        self.ordinal(device)
        return c.c_void_p()

    def exchange(self, device: str, theirs: c.c_uint64) -> None:
        self.enter(device)
        if self._memory[theirs.value] != list(words(SEEDED)):
            raise ProbeError("read from the other's memory: others")
        if self._lost:
            return
        written = list(words(WRITTEN))
        if self._flips:
            written[7] ^= 1 << 5
        self._memory[theirs.value] = written

    def __call__(self, name: str, *arguments: Any) -> None:
        """The calls of the probe. Copies go through the host, as they do where peer access is broken: they work."""
        if name == "cuDeviceCanAccessPeer":
            arguments[0]._obj.value = int(self._offers)
        elif name == "cuMemAlloc_v2":
            arguments[0]._obj.value = 4096 * (len(self._memory) + 1)
        elif name == "cuMemcpyHtoD_v2":
            self._memory[arguments[0].value] = list(arguments[1])
        elif name == "cuMemcpyDtoH_v2":
            arguments[0][:] = self._memory[arguments[1].value]
        elif name not in ("cuCtxEnablePeerAccess", "cuMemFree_v2"):
            raise AssertionError(f"{name} is not part of this driver")
