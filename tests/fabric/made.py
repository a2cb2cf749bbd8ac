"""Groups for tests: facts as a probe would tell them, with what a test wants otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from workbench.fabric import NO_CLIQUE, Allocator, Clique, Fabric, Facts, Link, Outcome, Trial
from workbench.ranks import GroupKey

WORKS = Trial(Outcome.WORKS, "wrote and read back")
FAILS = Trial(Outcome.FAILS, "read back other words")
CLIQUE = Clique(state="completed", cluster_uuid="5a0c", clique_id=7, healthy=True)


def make_facts(
    size: int,
    *,
    num_hosts: int = 1,
    clique: bool = False,
    allocator: Allocator = Allocator.PLAIN,
    arch: str = "sm90",
    multicast: bool = False,
) -> tuple[Facts, ...]:
    """`size` members on `num_hosts` hosts in blocks, NVLink and peer access within each host."""
    on = [rank * num_hosts // size for rank in range(size)]
    return tuple(
        Facts(
            world_rank=rank,
            host=f"boot-{on[rank]}",
            node=f"node{on[rank]}",
            device=f"GPU-{rank}",
            device_name="H200",
            arch=arch,
            num_sms=132,
            links=tuple(
                Link(device=f"GPU-{other}", nvlink=True, peer_access=WORKS, ipc=WORKS)
                for other in range(size)
                if other != rank and on[other] == on[rank]
            ),
            clique=CLIQUE if clique else NO_CLIQUE,
            allocator=allocator,
            vmm_fd=WORKS,
            vmm_fabric=WORKS if clique else FAILS,
            multicast_supported=multicast,
            multicast_forbidden=not multicast,
        )
        for rank in range(size)
    )


def make_fabric(size: int, **what: Any) -> Fabric:
    return fabric_of(make_facts(size, **what))


def fabric_of(facts: tuple[Facts, ...]) -> Fabric:
    return Fabric(GroupKey("tp", tuple(f.world_rank for f in facts)), facts)


def with_one(fabric: Fabric, world_rank: int, **fields: Any) -> Fabric:
    """The same group, one member of which says something else."""
    return fabric_of(tuple(replace(f, **fields) if f.world_rank == world_rank else f for f in fabric.facts))


class Blind:
    """Facts that raise when clique or allocator is read: what a decision for one host must never do."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def __getattr__(self, name: str) -> Any:
        if name in ("clique", "allocator", "vmm_fd", "vmm_fabric"):
            raise AssertionError(f"a decision for one host read {name}")
        return getattr(self._facts, name)


def blind(fabric: Fabric) -> Fabric:
    return Fabric(fabric.key, tuple(Blind(f) for f in fabric.facts))  # type: ignore[misc]  # reads like Facts
