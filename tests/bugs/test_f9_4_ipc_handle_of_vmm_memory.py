"""vllm-project/vllm#42609, ROCm/aiter#4174.

Symptom: with `expandable_segments:True` custom all-reduce ends in "invalid argument". Cause: a legacy IPC handle is
asked for memory that the allocator made with the VMM calls, for which there is none. Modelled on kinds of allocator.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from workbench.fabric import Allocator, Capability, Fabric, decide_capability, simulated
from workbench.plan import Ask, decide_path
from workbench.ranks import GroupKey


def _fabric(*kinds: Allocator) -> Fabric:
    machine = simulated("h100x8")
    facts = tuple(replace(machine.facts_of(r), allocator=kind) for r, kind in enumerate(kinds))
    return Fabric(GroupKey("tp", tuple(range(len(kinds)))), facts)


def test_old_the_handle_is_asked_for_whatever_the_memory_is() -> None:
    def ipc_handle(kind: Allocator) -> str:
        if kind is not Allocator.PLAIN:
            raise RuntimeError("invalid argument")
        return "handle"

    assert ipc_handle(Allocator.PLAIN) == "handle"
    with pytest.raises(RuntimeError, match="invalid argument"):
        ipc_handle(Allocator.VMM_POSIX_FD)


@pytest.mark.parametrize(
    ("kinds", "ipc", "vmm"),
    [
        ((Allocator.PLAIN, Allocator.PLAIN), True, False),
        ((Allocator.VMM_POSIX_FD, Allocator.VMM_POSIX_FD), False, True),
        ((Allocator.PLAIN, Allocator.VMM_POSIX_FD), False, False),
        ((Allocator.NONE, Allocator.NONE), False, False),
    ],
)
def test_each_kind_of_memory_is_shared_in_its_own_way_and_staging_needs_none(kinds, ipc: bool, vmm: bool) -> None:
    fabric = _fabric(*kinds)
    found = {c: decide_capability(fabric, c) for c in Capability}
    assert found[Capability.GRAPH_ZERO_COPY_IPC].ok is ipc
    assert found[Capability.GRAPH_ZERO_COPY_VMM].ok is vmm
    assert found[Capability.STAGED].ok
    assert decide_path(fabric, Ask(hidden=4096, tokens=8)).choice == "custom.fused.push"


def test_the_refusal_names_the_ranks_and_what_they_have() -> None:
    verdict = decide_capability(_fabric(Allocator.PLAIN, Allocator.VMM_POSIX_FD), Capability.GRAPH_ZERO_COPY_IPC)
    assert verdict.reason == "world rank 1: the allocator's memory is vmm-posix-fd, not plain"
