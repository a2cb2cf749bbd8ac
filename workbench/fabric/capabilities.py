"""What a group's kernels may do with each other's memory: four capabilities, each decided apart from the others.

Upstream once asked one question for all of them, so a launch without a VMM-backed allocator lost the staged path too,
which does not need one (18 % of a decode step on two trays of four GPUs). Here a missing capability costs itself only.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from workbench.fabric.fabric import Fabric
from workbench.fabric.facts import Allocator, Facts, Outcome, Trial
from workbench.fabric.verdict import Verdict, name_ranks


class Capability(Enum):
    """staged: kernels of our own memory that every member maps; inputs are copied into it, or pushed.
    graph_zero_copy_ipc: a captured graph's inputs read in place by peers, through CUDA IPC handles.
    graph_zero_copy_vmm: the same, through exported VMM handles.   multicast: one store reaches every member."""

    STAGED = "staged"
    GRAPH_ZERO_COPY_IPC = "graph_zero_copy_ipc"
    GRAPH_ZERO_COPY_VMM = "graph_zero_copy_vmm"
    MULTICAST = "multicast"


def decide_capability(fabric: Fabric, capability: Capability) -> Verdict:
    """Whether the group has the capability. Pure, and equal on every member that holds the same gathered facts."""
    return _RULES[capability](fabric)


def _staged(fabric: Fabric) -> Verdict:
    """One host: a GPU each, NVLink between all, peer access proven. Several: one clique, and fabric memory proven."""
    if not fabric.devices.ok:
        return fabric.devices
    local = _first_refusal(fabric.nvlink, fabric.p2p)
    if fabric.same_host.ok:
        return local or Verdict(True, f"{fabric.same_host.reason}, {fabric.nvlink.reason}, {fabric.p2p.reason}")
    across = _first_refusal(fabric.one_clique, _tried(fabric, "a fabric handle", lambda f: f.vmm_fabric))
    if across:
        return Verdict(False, f"{fabric.same_host.reason} and {across.reason}", across.evidence)
    return local or Verdict(
        True, f"{fabric.same_host.reason} in {fabric.one_clique.reason}", fabric.one_clique.evidence
    )


def _zero_copy_ipc(fabric: Fabric) -> Verdict:
    """IPC handles exist for plain memory only, and only between processes of one host."""
    if not fabric.same_host.ok:
        return Verdict(False, f"{fabric.same_host.reason}; CUDA IPC ends at the host")
    refusal = _first_refusal(_staged(fabric), _allocated(fabric, Allocator.PLAIN), fabric.ipc)
    return refusal or Verdict(True, f"{fabric.same_host.reason}, plain allocations, {fabric.ipc.reason}")


def _zero_copy_vmm(fabric: Fabric) -> Verdict:
    """VMM memory of one kind on every member; a file descriptor ends at the host, a fabric handle at the clique."""
    refusal = _staged(fabric)
    if not refusal.ok:
        return refusal
    if not fabric.same_host.ok:
        refusal = _allocated(fabric, Allocator.VMM_FABRIC)
        return refusal if not refusal.ok else Verdict(True, "fabric handles inside one NVLink clique")
    if not fabric.allocator.ok:
        return fabric.allocator
    kind = fabric.facts[0].allocator
    if kind is Allocator.VMM_FABRIC:
        return _tried(fabric, "a fabric handle", lambda f: f.vmm_fabric)
    refusal = _allocated(fabric, Allocator.VMM_POSIX_FD)
    return refusal if not refusal.ok else _tried(fabric, "a file descriptor", lambda f: f.vmm_fd)


def _multicast(fabric: Fabric) -> Verdict:
    """The setting is asked for last: it is advice only where devices and links would do."""
    return _first_refusal(fabric.multicast_devices, _staged(fabric)) or fabric.multicast


def _allocated(fabric: Fabric, wanted: Allocator) -> Verdict:
    others = [f for f in fabric.facts if f.allocator is not wanted]
    if not others:
        return Verdict(True, f"{wanted.value} allocations on every member")
    kinds = ", ".join(sorted({f.allocator.value for f in others}))
    advice = "" if wanted is Allocator.PLAIN else "; expandable_segments:True in PYTORCH_ALLOC_CONF gives such memory"
    ranks = name_ranks(f.world_rank for f in others)
    return Verdict(False, f"{ranks}: the allocator's memory is {kinds}, not {wanted.value}{advice}")


def _tried(fabric: Fabric, what: str, read: Callable[[Facts], Trial]) -> Verdict:
    for facts in fabric.facts:
        trial = read(facts)
        if trial.outcome is not Outcome.WORKS:
            return Verdict(False, f"world rank {facts.world_rank}: sharing memory by {what} {trial}")
    return Verdict(True, f"sharing memory by {what} tried and working on every member")


def _first_refusal(*verdicts: Verdict) -> Verdict | None:
    return next((v for v in verdicts if not v.ok), None)


_RULES: dict[Capability, Callable[[Fabric], Verdict]] = {
    Capability.STAGED: _staged,
    Capability.GRAPH_ZERO_COPY_IPC: _zero_copy_ipc,
    Capability.GRAPH_ZERO_COPY_VMM: _zero_copy_vmm,
    Capability.MULTICAST: _multicast,
}
