"""Tries what one GPU can do with the others of its host. Run as a program, in a process of its own that may be killed.

    python cuda_probe.py DEVICE_UUID STEP...        one JSON line a step: {"step", "outcome", "reason", "value"}

steps: devices; nvml; vmm_fd; vmm_fabric; peer_access:UUID; ipc:UUID. A driver's yes is never taken for an answer: a
kernel on the probed GPU reads words that were put into the other's memory and writes others, and the other GPU is asked
what it finds. The kernel is PTX, which the driver compiles, so no toolkit is needed. Nothing here uses the rest of the
package or torch. No multicast object is ever made: where multicast is broken, making one can harm the host.
"""

from __future__ import annotations

import ctypes as c
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NUM_WORDS = 256
SEEDED, WRITTEN = 0x5EED0000, 0x0B0E0000
ATTRIBUTES = {"multicast": 132, "vmm": 102, "fd": 103, "fabric": 128}
FD, FABRIC = 1, 8  # CUmemAllocationHandleType
P2P_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK
FABRIC_STATES = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}  # nvmlGpuFabricState_t
FABRIC_COMPLETED = 3
PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry exchange(.param .u64 theirs, .param .u64 mine, .param .u32 first)
{
  .reg .b32 %r<4>;
  .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [theirs];
  ld.param.u64 %rd2, [mine];
  ld.param.u32 %r1, [first];
  mov.u32 %r2, %tid.x;
  mul.wide.u32 %rd3, %r2, 4;
  add.s64 %rd1, %rd1, %rd3;
  add.s64 %rd2, %rd2, %rd3;
  ld.volatile.global.u32 %r3, [%rd1];
  st.volatile.global.u32 [%rd2], %r3;
  add.u32 %r1, %r1, %r2;
  st.volatile.global.u32 [%rd1], %r1;
  ret;
}
"""


class ProbeError(Exception):
    """Something that was tried does not work; the text says what."""


class Location(c.Structure):
    _fields_ = [("type", c.c_int), ("id", c.c_int)]


class AllocationProperties(c.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", c.c_int),
        ("handle_types", c.c_int),
        ("location", Location),
        ("win32", c.c_void_p),
        ("flags", c.c_uint8 * 8),
    ]


class AccessDescription(c.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", c.c_int)]


class IpcHandle(c.Structure):
    _fields_ = [("bytes", c.c_uint8 * 64)]


class FabricInfo(c.Structure):
    """nvmlGpuFabricInfo_v2_t."""

    _fields_ = [
        ("version", c.c_uint),
        ("cluster_uuid", c.c_uint8 * 16),
        ("status", c.c_int),
        ("clique_id", c.c_uint),
        ("state", c.c_uint8),
        ("health_mask", c.c_uint),
    ]


class Nvml:
    """libnvidia-ml, which comes with the driver."""

    def __init__(self) -> None:
        try:
            self._library = c.CDLL("libnvidia-ml.so.1")
        except OSError as e:
            raise ProbeError(f"no NVML, so NVLink and clique are unknown: {e}") from None
        self._library.nvmlErrorString.restype = c.c_char_p
        self("nvmlInit_v2")

    def __call__(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise ProbeError(f"{name}: not in this driver's NVML") from None
        code = function(*arguments)
        if code:
            raise ProbeError(f"{name}: {self.explain(code)}")

    def explain(self, code: int) -> str:
        return (self._library.nvmlErrorString(c.c_int(code)) or b"error").decode()

    def handle(self, device: str) -> c.c_void_p:
        found = c.c_void_p()
        self("nvmlDeviceGetHandleByUUID", c.c_char_p(device.encode()), c.byref(found))
        return found


class Driver:
    """libcuda, its devices by UUID, and their primary contexts."""

    def __init__(self) -> None:
        try:
            self._library = c.CDLL("libcuda.so.1")
        except OSError as e:
            raise ProbeError(f"no NVIDIA driver: {e}") from None
        self("cuInit", c.c_uint(0))
        count = c.c_int()
        self("cuDeviceGetCount", c.byref(count))
        self.ordinals = {self._uuid(i): i for i in range(count.value)}
        self._contexts: dict[int, c.c_void_p] = {}

    def __call__(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = c.c_char_p()
            self._library.cuGetErrorName(code, c.byref(text))
            raise ProbeError(f"{name}: {(text.value or b'error').decode()}")

    def ordinal(self, device: str) -> int:
        if device not in self.ordinals:
            raise ProbeError(f"device {device} is not visible")
        return self.ordinals[device]

    def attribute(self, device: str, name: str) -> bool:
        value = c.c_int()
        self("cuDeviceGetAttribute", c.byref(value), c.c_int(ATTRIBUTES[name]), c.c_int(self.ordinal(device)))
        return bool(value.value)

    def enter(self, device: str) -> c.c_void_p:
        """Make the device's primary context current, and give it."""
        ordinal = self.ordinal(device)
        if ordinal not in self._contexts:
            context = c.c_void_p()
            self("cuDevicePrimaryCtxRetain", c.byref(context), c.c_int(ordinal))
            self._contexts[ordinal] = context
        self("cuCtxSetCurrent", self._contexts[ordinal])
        return self._contexts[ordinal]

    @contextmanager
    def memory(self, device: str) -> Iterator[c.c_uint64]:
        """Seeded words on a device."""
        self.enter(device)
        address = c.c_uint64()
        self("cuMemAlloc_v2", c.byref(address), c.c_size_t(4 * NUM_WORDS))
        try:
            self.seed(address)
            yield address
        finally:
            self.enter(device)
            self("cuMemFree_v2", address)

    def seed(self, address: c.c_uint64) -> None:
        self("cuMemcpyHtoD_v2", address, words(SEEDED), c.c_size_t(4 * NUM_WORDS))

    def require(self, device: str, address: c.c_uint64, first: int, what: str) -> None:
        """Raise unless the device's memory holds the words that start at `first`."""
        self.enter(device)
        found = (c.c_uint32 * NUM_WORDS)()
        self("cuMemcpyDtoH_v2", found, address, c.c_size_t(4 * NUM_WORDS))
        wrong = sum(a != b for a, b in zip(found, words(first), strict=True))
        if wrong:
            raise ProbeError(f"{what}: {wrong} of {NUM_WORDS} words are others")

    def exchange(self, device: str, theirs: c.c_uint64) -> None:
        """A kernel on `device` reads the seeded words at `theirs` and writes others there. Raises if it read others."""
        with self.memory(device) as mine:
            module, function = c.c_void_p(), c.c_void_p()
            self("cuModuleLoadData", c.byref(module), c.c_char_p(PTX))
            self("cuModuleGetFunction", c.byref(function), module, c.c_char_p(b"exchange"))
            values = (theirs, mine, c.c_uint32(WRITTEN))
            arguments = (c.c_void_p * 3)(*(c.cast(c.byref(v), c.c_void_p) for v in values))
            one = c.c_uint(1)
            self("cuMemsetD8_v2", mine, c.c_ubyte(0), c.c_size_t(4 * NUM_WORDS))
            self(
                "cuLaunchKernel",
                function,
                one,
                one,
                one,
                c.c_uint(NUM_WORDS),
                one,
                one,
                c.c_uint(0),
                None,
                arguments,
                None,
            )
            self("cuCtxSynchronize")
            self.require(device, mine, SEEDED, "read from the other's memory")
            self("cuModuleUnload", module)

    def _uuid(self, ordinal: int) -> str:
        raw = (c.c_uint8 * 16)()
        self("cuDeviceGetUuid_v2", c.byref(raw), c.c_int(ordinal))
        return f"GPU-{uuid.UUID(bytes=bytes(raw))}"


def words(first: int) -> c.Array[c.c_uint32]:
    return (c.c_uint32 * NUM_WORDS)(*range(first, first + NUM_WORDS))


def probe_devices(driver: Driver, device: str) -> dict[str, Any]:
    """UUIDs that this process can see, and whether the device's attributes speak of multicast."""
    return {"devices": list(driver.ordinals), "multicast": driver.attribute(device, "multicast")}


def probe_peer_access(driver: Driver, device: str, other: str) -> None:
    can = c.c_int()
    driver("cuDeviceCanAccessPeer", c.byref(can), c.c_int(driver.ordinal(device)), c.c_int(driver.ordinal(other)))
    if not can.value:
        raise ProbeError("the driver offers no peer access")
    with driver.memory(other) as theirs:
        context = driver.enter(other)
        driver.enter(device)
        driver("cuCtxEnablePeerAccess", context, c.c_uint(0))
        driver.exchange(device, theirs)
        driver.require(other, theirs, WRITTEN, "written to the other's memory")


def probe_ipc(driver: Driver, device: str, other: str) -> None:
    """The memory is this process's, on the other device; a second process opens it on the probed one."""
    with driver.memory(other) as theirs:
        handle = IpcHandle()
        driver("cuIpcGetMemHandle", c.byref(handle), theirs)
        command = [sys.executable, "-P", __file__, device, f"open:{bytes(handle.bytes).hex()}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        answer = json.loads(done.stdout or "{}")
        if answer.get("outcome") != "works":
            raise ProbeError(f"in a second process: {answer.get('reason', f'status {done.returncode}')}")
        driver.require(other, theirs, WRITTEN, "written by a second process")


def probe_open(driver: Driver, device: str, handle_hex: str) -> None:
    """The second process of probe_ipc."""
    handle, address = IpcHandle((c.c_uint8 * 64)(*bytes.fromhex(handle_hex))), c.c_uint64()
    driver.enter(device)
    driver("cuIpcOpenMemHandle_v2", c.byref(address), handle, c.c_uint(1))  # 1: enable peer access if it takes that
    driver.exchange(device, address)
    driver.enter(device)
    driver("cuIpcCloseMemHandle", address)


def probe_vmm(driver: Driver, device: str, handle_type: int) -> None:
    """Create exportable memory, export, import again, map the import, and exchange words with it."""
    attribute = "fd" if handle_type == FD else "fabric"
    if not (driver.attribute(device, "vmm") and driver.attribute(device, attribute)):
        raise ProbeError("the device's attributes say no")
    driver.enter(device)
    place = Location(1, driver.ordinal(device))
    wanted = AllocationProperties(type=1, handle_types=handle_type, location=place)
    size = c.c_size_t()
    driver("cuMemGetAllocationGranularity", c.byref(size), c.byref(wanted), c.c_int(0))
    created, imported, address = c.c_uint64(), c.c_uint64(), c.c_uint64()
    driver("cuMemCreate", c.byref(created), size, c.byref(wanted), c.c_uint64(0))
    descriptor, fabric_handle = c.c_int(-1), (c.c_uint8 * 64)()
    exported: Any = c.byref(descriptor) if handle_type == FD else c.byref(fabric_handle)
    driver("cuMemExportToShareableHandle", exported, created, c.c_int(handle_type), c.c_uint64(0))
    source = c.c_void_p(descriptor.value) if handle_type == FD else c.cast(fabric_handle, c.c_void_p)
    driver("cuMemImportFromShareableHandle", c.byref(imported), source, c.c_int(handle_type))
    driver("cuMemAddressReserve", c.byref(address), size, c.c_size_t(0), c.c_uint64(0), c.c_uint64(0))
    driver("cuMemMap", address, size, c.c_size_t(0), imported, c.c_uint64(0))
    access = AccessDescription(place, 3)
    driver("cuMemSetAccess", address, size, c.byref(access), c.c_size_t(1))
    driver.seed(address)
    driver.exchange(device, address)
    driver.require(device, address, WRITTEN, "written to the imported memory")
    driver("cuMemUnmap", address, size)
    driver("cuMemAddressFree", address, size)
    driver("cuMemRelease", imported)
    driver("cuMemRelease", created)
    if descriptor.value >= 0:
        os.close(descriptor.value)


def probe_nvml(device: str) -> dict[str, Any]:
    """NVLink peers of the device by UUID, pairwise, and the fabric that it says it belongs to."""
    nvml = Nvml()
    mine = nvml.handle(device)
    count = c.c_uint()
    nvml("nvmlDeviceGetCount_v2", c.byref(count))
    nvlink = {}
    for i in range(count.value):
        other, name, status = c.c_void_p(), c.create_string_buffer(96), c.c_uint()
        nvml("nvmlDeviceGetHandleByIndex_v2", c.c_uint(i), c.byref(other))
        nvml("nvmlDeviceGetUUID", other, name, c.c_uint(len(name)))
        uuid_text = name.value.decode()
        if uuid_text != device:
            nvml("nvmlDeviceGetP2PStatus", mine, other, c.c_uint(P2P_NVLINK), c.byref(status))
            nvlink[uuid_text] = status.value == 0
    return {"nvlink": nvlink, "clique": _clique(nvml, mine)}


def _clique(nvml: Nvml, handle: c.c_void_p) -> dict[str, Any]:
    info = FabricInfo(version=c.sizeof(FabricInfo) | 2 << 24)
    try:
        nvml("nvmlDeviceGetGpuFabricInfoV", handle, c.byref(info))
    except ProbeError as e:
        return {"state": f"unknown: {e}", "cluster_uuid": "", "clique_id": 0, "healthy": True}
    state = FABRIC_STATES.get(info.state, f"state {info.state}")
    if info.state == FABRIC_COMPLETED and info.status:
        state = f"failed: {nvml.explain(info.status)}"
    return {
        "state": state,
        "cluster_uuid": str(uuid.UUID(bytes=bytes(info.cluster_uuid))),
        "clique_id": info.clique_id,
        "healthy": is_healthy(info.health_mask),
    }


def is_healthy(mask: int) -> bool:
    """No trouble in NVML's fabric health mask: degraded bandwidth, route recovery, unhealthy route, access timeout
    recovery (two bits each from bit 0 on, 1 is trouble), wrong configuration (four bits from bit 8 on, 2 and above)."""
    return all((mask >> shift) & 3 != 1 for shift in (0, 2, 4, 6)) and (mask >> 8) & 15 < 2


def main(device: str, steps: list[str]) -> None:
    c.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the rank that asked
    driver: Driver | None = None
    for step in steps:
        name, _, other = step.partition(":")
        answer: dict[str, Any] = {
            "step": step,
            "outcome": "works",
            "reason": "words written and read back",
            "value": None,
        }
        try:
            if name == "nvml":
                answer["value"] = probe_nvml(device)
            else:
                driver = driver or Driver()
                answer["value"] = _run(driver, name, device, other)
        except ProbeError as e:
            answer |= {"outcome": "fails", "reason": str(e)[:300]}
        except Exception as e:  # a defect here must not look like silence; the parent shows it as the reason
            answer |= {"outcome": "fails", "reason": f"{type(e).__name__}: {e}"[:300]}
        print(json.dumps(answer), flush=True)
        if answer["outcome"] == "fails" and name != "nvml":
            return  # the context may be spoilt; a fresh process takes the steps that are left


def _run(driver: Driver, name: str, device: str, other: str) -> dict[str, Any] | None:
    if name == "devices":
        return probe_devices(driver, device)
    if name in ("vmm_fd", "vmm_fabric"):
        probe_vmm(driver, device, FD if name == "vmm_fd" else FABRIC)
    elif name == "peer_access":
        probe_peer_access(driver, device, other)
    elif name == "ipc":
        probe_ipc(driver, device, other)
    elif name == "open":
        probe_open(driver, device, other)
    else:
        raise ProbeError(f"no step is called {name}")
    return None


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
