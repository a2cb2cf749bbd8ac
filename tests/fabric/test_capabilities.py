"""Pins the four capabilities, each apart from the others, and that one host is decided without clique or allocator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fabric.made import FAILS, blind, fabric_of, make_fabric, with_one
from workbench.fabric import Allocator, Capability, Fabric, decide_capability, simulated

STAGED, IPC, VMM, MULTICAST = Capability

# (one host, one clique, allocator) -> (staged, graph zero-copy by IPC, graph zero-copy by VMM)
LITERAL = {
    (True, True, "plain"): (True, True, False),
    (True, True, "vmm-posix-fd"): (True, False, True),
    (True, True, "vmm-fabric"): (True, False, True),
    (True, False, "plain"): (True, True, False),
    (True, False, "vmm-posix-fd"): (True, False, True),
    (True, False, "vmm-fabric"): (True, False, False),  # nobody could export a fabric handle
    (False, True, "plain"): (True, False, False),  # upstream said no to all three here, at 18 % of a decode step
    (False, True, "vmm-posix-fd"): (True, False, False),  # a file descriptor ends at the host
    (False, True, "vmm-fabric"): (True, False, True),
    (False, False, "plain"): (False, False, False),
    (False, False, "vmm-posix-fd"): (False, False, False),
    (False, False, "vmm-fabric"): (False, False, False),
}


def verdicts(fabric: Fabric) -> dict[Capability, bool]:
    return {c: decide_capability(fabric, c).ok for c in Capability}


def test_capabilities_of_every_combination_of_host_clique_and_allocator() -> None:
    checked = 0
    for (one_host, clique, allocator), expected in LITERAL.items():
        for size in range(2, 17):
            fabric = make_fabric(size, num_hosts=1 if one_host else 2, clique=clique, allocator=Allocator(allocator))
            found = verdicts(fabric)
            assert (found[STAGED], found[IPC], found[VMM]) == expected, (one_host, clique, allocator, size)
            assert found[MULTICAST] is False
            checked += 1
    assert checked == 12 * 15


def test_one_host_is_decided_without_reading_clique_or_allocator() -> None:
    for size in (2, 8, 16):
        assert decide_capability(blind(make_fabric(size)), STAGED).ok
    fabric = make_fabric(4)
    assert not decide_capability(blind(with_one(fabric, 1, links=())), STAGED).ok


@pytest.mark.parametrize(
    ("same_host", "clique", "vmm", "upstream", "staged", "zero_copy"),
    [
        # The four rows of the upstream capability test (sgl-project/sglang#35061); its answer, then our two.
        (False, True, True, True, True, True),
        (False, False, True, False, False, False),
        (False, True, False, False, True, False),
        (True, None, None, True, True, None),
    ],
)
def test_the_four_rows_of_the_upstream_matrix(
    same_host: bool, clique: bool | None, vmm: bool | None, upstream: bool, staged: bool, zero_copy: bool | None
) -> None:
    from workbench.plan import ask_upstream, upstream_rules

    size = 8 if same_host else 16
    allocator = Allocator.VMM_FABRIC if vmm else Allocator.PLAIN
    fabric = make_fabric(size, num_hosts=1 if same_host else 2, clique=bool(clique), allocator=allocator, arch="sm100")
    rule = next(r for r in upstream_rules("sglang", "custom_all_reduce") if r.id == "capability")
    situation = {"kinds": ("tp",), "kind": "tp", "arch": "sm100", "group_size": size, "same_host": same_host}
    situation["nvlink"] = True
    if clique is not None:
        situation |= {"one_clique": clique, "vmm": vmm}  # on one host these must not even be asked for
    assert ask_upstream(rule, situation).ok is upstream
    assert decide_capability(blind(fabric) if same_host else fabric, STAGED).ok is staged
    if zero_copy is not None:
        assert decide_capability(fabric, VMM).ok is zero_copy


@pytest.mark.parametrize(
    ("capability", "fields", "reason"),
    [
        (
            STAGED,
            {"vmm_fabric": FAILS},
            "world rank 5: sharing memory by a fabric handle fails (read back other words)",
        ),
        (STAGED, {"device": ""}, "world rank 5 without a GPU"),
        (STAGED, {"links": ()}, "world ranks 4, 5 of node1 are not connected by NVLink"),
        (VMM, {"allocator": Allocator.VMM_POSIX_FD}, "world rank 5: the allocator's memory is vmm-posix-fd"),
        (MULTICAST, {"multicast_supported": False}, "world rank 5 without multicast"),
    ],
)
def test_one_member_denies_a_capability_across_hosts_and_is_named(
    capability: Capability, fields: dict[str, object], reason: str
) -> None:
    fabric = make_fabric(8, num_hosts=2, clique=True, allocator=Allocator.VMM_FABRIC, multicast=True)
    assert decide_capability(fabric, capability).ok
    verdict = decide_capability(with_one(fabric, 5, **fields), capability)
    assert not verdict.ok
    assert reason in verdict.reason


def test_ipc_handles_that_fail_cost_the_zero_copy_and_nothing_else() -> None:
    """Legacy handles asked of memory that has none: vllm-project/vllm#42609."""
    fabric = make_fabric(4)
    links = tuple(replace(link, ipc=FAILS) for link in fabric.facts[3].links)
    found = verdicts(with_one(fabric, 3, links=links))
    assert (found[STAGED], found[IPC]) == (True, False)


def test_mixed_pools_have_no_zero_copy_of_either_kind() -> None:
    mixed = with_one(make_fabric(4), 2, allocator=Allocator.VMM_POSIX_FD)
    assert decide_capability(mixed, IPC).reason == "world rank 2: the allocator's memory is vmm-posix-fd, not plain"
    assert decide_capability(mixed, VMM).reason == (
        "mixed allocators (world ranks 0, 1, 3: plain; world rank 2: vmm-posix-fd)"
    )


def test_multicast_is_off_unless_allowed_and_everywhere() -> None:
    allowed = make_fabric(8, multicast=True)
    assert decide_capability(allowed, MULTICAST).ok
    off = fabric_of(tuple(replace(f, multicast_forbidden=True) for f in allowed.facts))
    assert decide_capability(off, MULTICAST).reason == (
        "world ranks 0..7: multicast is off; WORKBENCH_MULTICAST=1 allows it"
    )
    apart = make_fabric(8, num_hosts=2, multicast=True)
    assert not decide_capability(apart, MULTICAST).ok


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize(
    ("machine", "told"),
    [
        ("h200x8-nomc", "world ranks 0..7 without multicast in the device"),
        ("h200x2", "world ranks 0, 1 without multicast in the device"),
        ("pcie-pairs", "world ranks 0..3 without multicast in the device"),
        ("ib-2x8", "on 2 hosts (world ranks 0..7: node0; world ranks 8..15: node1) and world ranks 0..15 in no NVLink"),
    ],
)
def test_where_allowing_multicast_would_not_help_nobody_advises_it(machine: str, told: str, allowed: bool) -> None:
    place = simulated(machine)
    fabric = fabric_of(tuple(place.facts_of(r, multicast_allowed=allowed) for r in range(place.num_devices)))
    reason = decide_capability(fabric, MULTICAST).reason
    assert reason.startswith(told)
    assert "WORKBENCH_MULTICAST" not in reason
