"""Facts: what one rank knows of its own device, host and links. Read by a probe, or told by a simulated machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from workbench.documents import Document

JSON_SCHEMA = 1
MAX_LINKS = 1024


class Allocator(Enum):
    """What kind of memory the framework's caching allocator hands out on this rank."""

    NONE = "none"  # no device, or it could not be told
    PLAIN = "plain"  # cudaMalloc: CUDA IPC handles exist
    VMM_POSIX_FD = "vmm-posix-fd"  # cuMemCreate, exportable as a file descriptor to processes of the same host
    VMM_FABRIC = "vmm-fabric"  # cuMemCreate, exportable to every host of the NVLink clique


class Outcome(Enum):
    """What came of trying something."""

    WORKS = "works"
    FAILS = "fails"
    UNTRIED = "untried"


@dataclass(frozen=True, slots=True)
class Trial:
    """Something that was tried on the real thing, or why it was not."""

    outcome: Outcome
    reason: str

    def __str__(self) -> str:
        return f"{self.outcome.value} ({self.reason})"


UNTRIED = Trial(Outcome.UNTRIED, "no GPU here")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way from this rank's device to another one that it can see. `device` is the other one's UUID.

    nvlink: the two are peers over NVLink, pairwise; that each has some NVLink lane up says nothing.
    peer_access: this device wrote into the other's memory and read it back.   ipc: the same through a CUDA IPC handle.
    """

    device: str
    nvlink: bool
    peer_access: Trial
    ipc: Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Clique:
    """The NVLink fabric that a device says it belongs to. Two devices share one if UUID and id agree; zero is none."""

    state: str  # "completed" once the fabric manager is done
    cluster_uuid: str
    clique_id: int
    healthy: bool

    @property
    def usable(self) -> bool:
        return self.state == "completed" and self.healthy and self.cluster_uuid.strip("0-") != ""

    def __str__(self) -> str:
        sick = "" if self.healthy else ", degraded"
        return f"state {self.state}{sick}, cluster {self.cluster_uuid or 'none'}, clique {self.clique_id}"


NO_CLIQUE = Clique(state="not supported", cluster_uuid="", clique_id=0, healthy=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What one rank knows. `device` is the GPU's UUID, and "" on a CPU rank; identity is never an ordinal.

    host: equal on two ranks exactly when they share a kernel (the boot id).   node: what people call that host.
    arch: "sm90".   num_sms: multiprocessors.   links: one a device that this rank can see, its own left out.
    vmm_fd, vmm_fabric: memory from cuMemCreate was exported, imported again, mapped, written and read.
    multicast_supported: the device's attribute.   multicast_forbidden: a setting says no; then nothing was tried.
    may_share: a setting lets this rank use a GPU that other ranks use too.
    notes: what could not be read, and why.
    """

    world_rank: int
    host: str
    node: str
    device: str = ""
    device_name: str = ""
    arch: str = ""
    num_sms: int = 0
    links: tuple[Link, ...] = ()
    clique: Clique = NO_CLIQUE
    allocator: Allocator = Allocator.NONE
    vmm_fd: Trial = UNTRIED
    vmm_fabric: Trial = UNTRIED
    multicast_supported: bool = False
    multicast_forbidden: bool = True
    may_share: bool = False
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"schema": JSON_SCHEMA, **_plain(asdict(self))}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str = "facts") -> Facts:
        """Raises: ArgumentError for a document of another shape."""
        doc = Document(data, where)
        doc.take_whole("schema", JSON_SCHEMA, JSON_SCHEMA)
        facts = cls(
            world_rank=doc.take_whole("world_rank", 0, 1 << 30),
            host=doc.take_text("host"),
            node=doc.take_text("node"),
            device=doc.take_text("device"),
            device_name=doc.take_text("device_name"),
            arch=doc.take_text("arch", pattern=r"(sm\d{2,3})?"),
            num_sms=doc.take_whole("num_sms", 0, 1 << 16),
            links=tuple(_read_link(link) for link in doc.take_children("links")),
            clique=_read_clique(doc.take_child("clique")),
            allocator=doc.take_choice("allocator", Allocator),
            vmm_fd=_read_trial(doc.take_child("vmm_fd")),
            vmm_fabric=_read_trial(doc.take_child("vmm_fabric")),
            multicast_supported=doc.take_flag("multicast_supported"),
            multicast_forbidden=doc.take_flag("multicast_forbidden"),
            may_share=doc.take_flag("may_share"),
            notes=doc.take_texts("notes"),
        )
        doc.end()
        return facts

    def __str__(self) -> str:
        where = f"world rank {self.world_rank} on {self.node}"
        if not self.device:
            return f"{where}: CPU"
        nvlink = sum(link.nvlink for link in self.links)
        reached = sum(link.peer_access.outcome is Outcome.WORKS for link in self.links)
        multicast = "forbidden" if self.multicast_forbidden else "yes" if self.multicast_supported else "no"
        return (
            f"{where}: {self.device_name} {self.device} {self.arch}, {self.num_sms} SMs; NVLink to {nvlink} and peer "
            f"access to {reached} of {len(self.links)} devices; {self.clique}; allocator {self.allocator.value}; "
            f"multicast {multicast}"
        )


def _read_link(doc: Document) -> Link:
    link = Link(
        device=doc.take_text("device"),
        nvlink=doc.take_flag("nvlink"),
        peer_access=_read_trial(doc.take_child("peer_access")),
        ipc=_read_trial(doc.take_child("ipc")),
    )
    doc.end()
    return link


def _read_trial(doc: Document) -> Trial:
    trial = Trial(doc.take_choice("outcome", Outcome), doc.take_text("reason"))
    doc.end()
    return trial


def _read_clique(doc: Document) -> Clique:
    clique = Clique(
        state=doc.take_text("state"),
        cluster_uuid=doc.take_text("cluster_uuid"),
        clique_id=doc.take_whole("clique_id", 0, (1 << 32) - 1),
        healthy=doc.take_flag("healthy"),
    )
    doc.end()
    return clique


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {name: _plain(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
