"""Machines as data: one description gives the facts of every rank on it. Shipped ones, and a user's JSON file.

The fields of a description (`workbench why --show-machine NAME` prints one; only the first five are required):

schema            1
name              one word
nodes             hosts, 1..1024
gpus_per_node     1..32; world rank r sits on node r // gpus_per_node, as consecutive launchers place it
arch              "sm90" and the like
about             one line: what it stands for
device_name       text                  num_sms   multiprocessors
nvlink            "all", "none", or lists of local GPU numbers that are connected among themselves: [[0, 1], [2, 3]]
peer_access       true if GPUs of one host reach each other's memory, over NVLink or PCIe
cliques           lists of nodes that share one NVLink clique: [[0, 1, 2, 3]]; none by default
allocator         "plain", "vmm-posix-fd" or "vmm-fabric": what the framework's caching allocator hands out
multicast         true if the devices support it
differing         {"5": {"allocator": "vmm-fabric"}}: what single ranks have otherwise; fields as above, and "in_clique"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from workbench.documents import Document, parse_document, read_document
from workbench.errors import ArgumentError
from workbench.fabric.facts import NO_CLIQUE, Allocator, Clique, Facts, Link, Outcome, Trial

SIMULATED = (
    "h100x8",
    "h200x8-nomc",
    "h200x2",
    "b200x8",
    "gb200-4x4",
    "gb200-2x4",
    "gb200-4x4-two-cliques",
    "pcie-pairs",
    "ib-2x8",
)
REQUIRED = ("schema", "name", "nodes", "gpus_per_node", "arch")
MAX_DEVICES = 8192
MAX_GPUS_PER_NODE = 32

_WORKS = Trial(Outcome.WORKS, "simulated")
_FAILS = Trial(Outcome.FAILS, "simulated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Nodes of equal GPUs, simulated. `nvlink` and `cliques` hold groups of local GPU numbers and of node numbers."""

    name: str
    about: str
    nodes: int
    gpus_per_node: int
    device_name: str
    arch: str
    num_sms: int
    nvlink: tuple[tuple[int, ...], ...] = ()
    peer_access: bool = True
    cliques: tuple[tuple[int, ...], ...] = ()
    allocator: Allocator = Allocator.PLAIN
    multicast: bool = False
    differing: tuple[tuple[int, tuple[tuple[str, Any], ...]], ...] = ()

    @property
    def num_devices(self) -> int:
        return self.nodes * self.gpus_per_node

    def facts_of(self, world_rank: int, *, multicast_allowed: bool = False) -> Facts:
        """What a probe would say on that rank. Raises ArgumentError for a rank beyond the last GPU."""
        if not 0 <= world_rank < self.num_devices:
            raise ArgumentError(
                f"world rank {world_rank} has no GPU on {self.name}: {self.nodes} nodes of {self.gpus_per_node} GPUs "
                f"are {self.num_devices}; choose a smaller layout or another machine"
            )
        node, place = divmod(world_rank, self.gpus_per_node)
        facts = Facts(
            world_rank=world_rank,
            host=f"{self.name}-host{node}",
            node=f"node{node}",
            device=self._device(node, place),
            device_name=self.device_name,
            arch=self.arch,
            num_sms=self.num_sms,
            links=tuple(self._link(node, place, other) for other in range(self.gpus_per_node) if other != place),
            clique=self._clique(node),
            allocator=self.allocator,
            vmm_fd=_WORKS,
            vmm_fabric=_WORKS if self._clique(node).usable else _FAILS,
            multicast_supported=self.multicast,
            multicast_forbidden=not multicast_allowed,
        )
        return _differ(facts, dict(dict(self.differing).get(world_rank, ())))

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "name": self.name,
            "about": self.about,
            "nodes": self.nodes,
            "gpus_per_node": self.gpus_per_node,
            "device_name": self.device_name,
            "arch": self.arch,
            "num_sms": self.num_sms,
            "nvlink": [list(group) for group in self.nvlink] or "none",
            "peer_access": self.peer_access,
            "cliques": [list(group) for group in self.cliques],
            "allocator": self.allocator.value,
            "multicast": self.multicast,
            "differing": {str(rank): dict(fields) for rank, fields in self.differing},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Machine:
        """Raises: ArgumentError, naming the field, for a description that is not of the form above."""
        return _parse(Document(data, "machine"))

    def __str__(self) -> str:
        gpus = f"{self.nodes} x {self.gpus_per_node} {self.device_name} ({self.arch})"
        cliques = f"{len(self.cliques)} NVLink clique{'s' if len(self.cliques) != 1 else ''}"
        multicast = "multicast" if self.multicast else "no multicast"
        return (
            f"{self.name} (simulated): {self.about}; {gpus}, {cliques}, allocator {self.allocator.value}, {multicast}"
        )

    def _device(self, node: int, place: int) -> str:
        return f"GPU-{self.name}-{node}-{place}"

    def _link(self, node: int, place: int, other: int) -> Link:
        reached = _WORKS if self.peer_access else _FAILS
        connected = any(place in group and other in group for group in self.nvlink)
        return Link(device=self._device(node, other), nvlink=connected, peer_access=reached, ipc=reached)

    def _clique(self, node: int) -> Clique:
        for i, nodes in enumerate(self.cliques):
            if node in nodes:
                return Clique(state="completed", cluster_uuid=f"{self.name}-fabric", clique_id=i, healthy=True)
        return NO_CLIQUE


def simulated(name: str) -> Machine:
    """A shipped machine by its id. Raises ArgumentError with the ids there are."""
    if name not in SIMULATED:
        raise ArgumentError(f"no simulated machine is called {name[:64]!r}; there are {', '.join(SIMULATED)}")
    return _shipped(name)


def read_machine(name_or_path: str) -> Machine:
    """A shipped machine, or the one in a JSON file. Raises ArgumentError for neither, and for a bad file."""
    if name_or_path in SIMULATED:
        return simulated(name_or_path)
    if not name_or_path.endswith(".json") and "/" not in name_or_path:
        asked = name_or_path[:64].lower()
        longer = [name for name in SIMULATED if asked and name.startswith(asked)]
        close = longer or get_close_matches(asked, SIMULATED, n=1, cutoff=0.5)
        nearest = f"; nearest name: {close[0]!r}" if close else ""
        raise ArgumentError(
            f"no machine is called {name_or_path[:64]!r}; allowed: {', '.join(SIMULATED)}, or a path to a .json file"
            f"{nearest}"
        )
    return _parse(read_document(name_or_path))


def describe_host(facts: Sequence[Facts], *, name: str, about: str) -> Machine:
    """One host as a machine, from the facts of each of its GPUs in local order.

    Of GPUs that differ in architecture, allocator or multicast the first one stands for the host, the others are told
    in `differing`. NVLink that does not join whole groups of GPUs is told for the groups that it does join.
    Raises: ArgumentError for no GPU, or GPUs of several hosts.
    """
    hosts = {f.host for f in facts if f.device}
    if len(hosts) != 1 or not all(f.device for f in facts):
        raise ArgumentError(f"GPUs of one host make a description; these are {len(facts)} ranks on {len(hosts)} hosts")
    first = facts[0]
    told = {"arch": first.arch, "allocator": first.allocator.value, "multicast": first.multicast_supported}
    differing = []
    for place, f in enumerate(facts):
        own = {"arch": f.arch, "allocator": f.allocator.value, "multicast": f.multicast_supported}
        other = tuple((field, value) for field, value in own.items() if value != told[field])
        differing += [(place, other)] if other else []
    return Machine(
        name=name,
        about=about,
        nodes=1,
        gpus_per_node=len(facts),
        device_name=first.device_name,
        arch=first.arch,
        num_sms=min(f.num_sms for f in facts),
        nvlink=_joined(facts),
        peer_access=all(link.peer_access.outcome is Outcome.WORKS for f in facts for link in f.links),
        cliques=((0,),) if all(f.clique.usable for f in facts) else (),
        allocator=first.allocator,
        multicast=first.multicast_supported,
        differing=tuple(differing),
    )


def _joined(facts: Sequence[Facts]) -> tuple[tuple[int, ...], ...]:
    """Groups of two GPUs and more, by local number, in which each one is an NVLink peer of each other one."""
    peers = [{link.device for link in f.links if link.nvlink} for f in facts]
    groups: list[list[int]] = []
    for place, f in enumerate(facts):
        for group in groups:
            if all(facts[other].device in peers[place] and f.device in peers[other] for other in group):
                group.append(place)
                break
        else:
            groups.append([place])
    return tuple(tuple(group) for group in groups if len(group) > 1)


@cache
def _shipped(name: str) -> Machine:
    text = (files("workbench.fabric") / "machines" / f"{name}.json").read_text(encoding="utf-8")
    return _parse(parse_document(text, f"{name}.json"))


def _parse(doc: Document) -> Machine:
    doc.require(*REQUIRED, advice="`workbench why --show-machine h100x8` prints a whole description to start from")
    doc.take_whole("schema", 1, 1)
    nodes = doc.take_whole("nodes", 1, 1024)
    gpus = doc.take_whole("gpus_per_node", 1, MAX_GPUS_PER_NODE)
    machine = Machine(
        name=doc.take_text("name", at_most=64, pattern=r"[A-Za-z0-9][A-Za-z0-9._-]*"),
        about=doc.take_text("about", default="a user's machine"),
        nodes=nodes,
        gpus_per_node=gpus,
        device_name=doc.take_text("device_name", default="GPU"),
        arch=doc.take_text("arch", pattern=r"sm\d{2,3}"),
        num_sms=doc.take_whole("num_sms", 1, 1024, default=132),
        nvlink=_nvlink(doc, gpus),
        peer_access=doc.take_flag("peer_access", default=True),
        cliques=_groups(doc, "cliques", nodes, "node"),
        allocator=doc.take_choice("allocator", Allocator, default=Allocator.PLAIN),
        multicast=doc.take_flag("multicast", default=False),
        differing=_differing(doc, nodes * gpus),
    )
    doc.end()
    if machine.num_devices > MAX_DEVICES:
        doc.refuse(f"{nodes} nodes of {gpus} GPUs are {machine.num_devices} devices; allowed: {MAX_DEVICES}")
    return machine


def _nvlink(doc: Document, gpus: int) -> tuple[tuple[int, ...], ...]:
    value = doc.take_value("nvlink") if doc.has("nvlink") else "none"
    if value == "all":
        return (tuple(range(gpus)),)
    return () if value == "none" else _groups(doc, "nvlink", gpus, "local GPU")


def _groups(doc: Document, name: str, count: int, what: str) -> tuple[tuple[int, ...], ...]:
    """Disjoint lists of numbers below `count`."""
    groups = doc.take_list(name, default=[])
    numbers = [n for group in groups if isinstance(group, list) for n in group]
    whole = all(isinstance(group, list) and group for group in groups) and all(type(n) is int for n in numbers)
    if not whole or len(set(numbers)) != len(numbers) or not all(0 <= n < count for n in numbers):
        doc.refuse(f"{name} must be lists of {what} numbers from 0 to {count - 1}, none of them twice")
    return tuple(tuple(group) for group in groups)


def _differing(doc: Document, devices: int) -> tuple[tuple[int, tuple[tuple[str, Any], ...]], ...]:
    by_rank = doc.take_child("differing", default={})
    differing = []
    for rank in by_rank.names():
        fields = by_rank.take_child(rank)
        if not (rank.isascii() and rank.isdigit() and len(rank) < 6 and int(rank) < devices):
            by_rank.refuse(f"the names of these fields are world ranks from 0 to {devices - 1}")
        found: dict[str, Any] = {}
        if fields.has("arch"):
            found["arch"] = fields.take_text("arch", pattern=r"sm\d{2,3}")
        if fields.has("allocator"):
            found["allocator"] = fields.take_choice("allocator", Allocator).value
        for name in ("multicast", "in_clique", "peer_access", "nvlink"):
            if fields.has(name):
                found[name] = fields.take_flag(name)
        fields.end()
        differing.append((int(rank), tuple(found.items())))
    return tuple(differing)


def _differ(facts: Facts, fields: Mapping[str, Any]) -> Facts:
    """Facts with what one rank has otherwise. A rank without peer access, or NVLink, lacks it to every other one."""
    if "arch" in fields:
        facts = replace(facts, arch=fields["arch"])
    if "allocator" in fields:
        facts = replace(facts, allocator=Allocator(fields["allocator"]))
    if "multicast" in fields:
        facts = replace(facts, multicast_supported=fields["multicast"])
    if not fields.get("in_clique", True):
        facts = replace(facts, clique=NO_CLIQUE, vmm_fabric=_FAILS)
    if not fields.get("peer_access", True):
        facts = replace(facts, links=tuple(replace(link, peer_access=_FAILS, ipc=_FAILS) for link in facts.links))
    if not fields.get("nvlink", True):
        facts = replace(facts, links=tuple(replace(link, nvlink=False) for link in facts.links))
    return facts
