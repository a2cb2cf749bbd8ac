"""Fabric: what the members of one group have in common, each answer worked out only when it is asked for.

Decisions for a group on one host read neither clique nor allocator: on such a host either may be missing or wrong
without doing any harm, so nothing here looks at them in passing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from workbench.errors import ArgumentError
from workbench.fabric.facts import Facts, Link, Outcome, Trial
from workbench.fabric.verdict import Verdict, name_ranks, name_shares
from workbench.ranks import GroupKey


@dataclass(frozen=True, slots=True)
class Fabric:
    """The gathered facts of one group, in group_rank order. Equal input gives equal answers on every member."""

    key: GroupKey
    facts: tuple[Facts, ...]

    def __post_init__(self) -> None:
        found = tuple(f.world_rank for f in self.facts)
        if found != self.key.world_ranks:
            raise ArgumentError(
                f"{self.key}: facts of world ranks {list(found)[:32]}; pass one a member, in group order"
            )

    @property
    def same_host(self) -> Verdict:
        """Whether all members share a kernel, told by host id: not by rank arithmetic, nor by GPUs seen."""
        nodes = self._ranks_by(lambda f: f.host)
        if len(nodes) == 1:
            return Verdict(True, f"all on {self.facts[0].node}", (f"host {self.facts[0].host}",))
        shares = self._ranks_by(lambda f: f"{f.node} (host {f.host})")
        named = f" ({name_shares(self._ranks_by(lambda f: f.node))})" if len(nodes) == 2 else ""
        return Verdict(
            False, f"on {len(nodes)} hosts{named}", tuple(f"{name_ranks(r)}: {h}" for h, r in shares.items())
        )

    @property
    def devices(self) -> Verdict:
        """Whether every member has a GPU of its own, or one that its sharers were all allowed to share."""
        without = [f.world_rank for f in self.facts if not f.device]
        if without:
            return Verdict(False, f"{name_ranks(without)} without a GPU")
        shared = {d: ranks for d, ranks in self._ranks_by(lambda f: f.device).items() if len(ranks) > 1}
        if shared:
            device, ranks = next(iter(shared.items()))
            allowed = all(f.may_share for f in self.facts if f.device in shared)
            word = ", as WORKBENCH_SHARE_GPUS allows" if allowed else ""
            return Verdict(allowed, f"{name_ranks(ranks)} share device {device}{word}")
        return Verdict(True, "a GPU each", tuple(f"world rank {f.world_rank}: {f.device}" for f in self.facts))

    @property
    def arch(self) -> Verdict:
        """Whether all members have one architecture; `reason` is its name then."""
        shares = self._ranks_by(lambda f: f.arch or "no GPU")
        if len(shares) == 1:
            return Verdict(True, next(iter(shares)), tuple(self._ranks_by(lambda f: f.device_name)))
        return Verdict(False, f"mixed architectures ({name_shares(shares)})")

    @property
    def num_sms(self) -> int:
        """Multiprocessors that every member has."""
        return min(f.num_sms for f in self.facts)

    @property
    def one_clique(self) -> Verdict:
        """Whether all members are in one NVLink clique: fabric completed and healthy, one cluster and clique id."""
        evidence = tuple(
            f"{name_ranks(ranks)}: {text}" for text, ranks in self._ranks_by(lambda f: str(f.clique)).items()
        )
        out = [f.world_rank for f in self.facts if not f.clique.usable]
        if out:
            why = next(f.clique for f in self.facts if f.world_rank == out[0])
            return Verdict(False, f"{name_ranks(out)} in no NVLink clique ({why})", evidence)
        cliques = self._ranks_by(lambda f: f"{f.clique.cluster_uuid} clique {f.clique.clique_id}")
        if len(cliques) > 1:
            return Verdict(False, f"in {len(cliques)} NVLink cliques ({name_shares(cliques)})", evidence)
        return Verdict(True, f"one NVLink clique ({next(iter(cliques))})", evidence)

    @property
    def nvlink(self) -> Verdict:
        """Whether every two members of one host are NVLink peers of each other."""
        for one, other, link in self._pairs():
            if link is None or not link.nvlink:
                ranks = name_ranks((one.world_rank, other.world_rank))
                notes = f" ({'; '.join(one.notes)})" if one.notes else ""
                return Verdict(False, f"{ranks} of {one.node} are not connected by NVLink{notes}")
        return Verdict(True, "NVLink between all GPUs of a host")

    @property
    def p2p(self) -> Verdict:
        """Whether every member wrote into the memory of every other one of its host and read it back.

        A driver's claim is no proof: one failure, and one pair that nobody tried, refuses for the group.
        """
        return self._all_links("peer access", lambda link: link.peer_access)

    @property
    def ipc(self) -> Verdict:
        """Whether the same worked through CUDA IPC handles."""
        return self._all_links("CUDA IPC", lambda link: link.ipc)

    @property
    def p2p_matrix(self) -> tuple[tuple[Verdict, ...], ...]:
        """Row i, column j: whether group_rank i reaches the memory of group_rank j, by what was tried from i."""
        return tuple(tuple(_reach(one, other) for other in self.facts) for one in self.facts)

    @property
    def allocator(self) -> Verdict:
        """Whether all members' caching allocators hand out one kind of memory; `reason` is the kind then."""
        shares = self._ranks_by(lambda f: f.allocator.value)
        if len(shares) == 1:
            return Verdict(True, next(iter(shares)))
        return Verdict(False, f"mixed allocators ({name_shares(shares)})")

    @property
    def multicast_devices(self) -> Verdict:
        """Whether every member's device supports multicast, whatever the setting says."""
        lacking = [f.world_rank for f in self.facts if not f.multicast_supported]
        if lacking:
            return Verdict(False, f"{name_ranks(lacking)} without multicast in the device")
        return Verdict(True, "multicast on every member")

    @property
    def multicast(self) -> Verdict:
        """Whether every member's device supports multicast and no setting forbids it; the devices are told first."""
        forbidden = [f.world_rank for f in self.facts if f.multicast_forbidden]
        if self.multicast_devices.ok and forbidden:
            return Verdict(False, f"{name_ranks(forbidden)}: multicast is off; WORKBENCH_MULTICAST=1 allows it")
        return self.multicast_devices

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.key.kind,
            "world_ranks": list(self.key.world_ranks),
            "facts": [f.to_json() for f in self.facts],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Fabric:
        """Raises: ArgumentError or LayoutError for a document of another shape."""
        facts = tuple(Facts.from_json(f, f"facts[{i}]") for i, f in enumerate(data["facts"]))
        return cls(GroupKey(str(data["kind"]), tuple(f.world_rank for f in facts)), facts)

    def __str__(self) -> str:
        parts = {
            "same host": self.same_host,
            "one clique": self.one_clique,
            "NVLink": self.nvlink,
            "peer access": self.p2p,
            "allocator": self.allocator,
            "multicast": self.multicast,
        }
        return f"{self.key}: {self.arch.reason}; " + "; ".join(f"{name} {verdict}" for name, verdict in parts.items())

    def _ranks_by(self, read: Callable[[Facts], str]) -> dict[str, list[int]]:
        shares: dict[str, list[int]] = {}
        for facts in self.facts:
            shares.setdefault(read(facts), []).append(facts.world_rank)
        return shares

    def _pairs(self) -> Iterator[tuple[Facts, Facts, Link | None]]:
        """Ordered pairs of different members that share a host, with what the first knows of the way to the second."""
        by_host: dict[str, list[Facts]] = {}
        for facts in self.facts:
            by_host.setdefault(facts.host, []).append(facts)
        for members in by_host.values():
            for one in members:
                links = {link.device: link for link in one.links}
                for other in members:
                    if one is not other:
                        yield one, other, _SAME_GPU if _share(one, other) else links.get(other.device)

    def _all_links(self, what: str, read: Callable[[Link], Any]) -> Verdict:
        for one, other, link in self._pairs():
            trial = read(link) if link is not None else None
            if trial is None or trial.outcome is not Outcome.WORKS:
                way = f"{what} from world rank {one.world_rank} to world rank {other.world_rank}"
                return Verdict(False, f"{way} {trial if trial is not None else _unseen(one)}")
        return Verdict(True, f"{what} tried and working between all GPUs of a host")


_SAME_GPU = Link(
    device="", nvlink=True, peer_access=Trial(Outcome.WORKS, "the same GPU"), ipc=Trial(Outcome.WORKS, "the same GPU")
)


def _share(one: Facts, other: Facts) -> bool:
    """Whether both use one GPU and may."""
    return bool(one.device) and one.device == other.device and one.may_share and other.may_share


def _unseen(one: Facts) -> str:
    return (
        f"untried (that device is not visible to world rank {one.world_rank}; let each rank see all GPUs of its host)"
    )


def _reach(one: Facts, other: Facts) -> Verdict:
    if one is other:
        return Verdict(True, "its own memory")
    if one.host != other.host:
        return Verdict(False, "untried (another host)")
    if _share(one, other):
        return Verdict(True, str(_SAME_GPU.peer_access))
    link = next((link for link in one.links if link.device == other.device), None)
    if link is None:
        return Verdict(False, _unseen(one))
    return Verdict(link.peer_access.outcome is Outcome.WORKS, str(link.peer_access))
