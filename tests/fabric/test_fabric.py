"""Pins what a group has in common, and that one member's difference is named by world rank.

Smallest machines of public reports: cards bridged in pairs (vllm-project/vllm#4159), a driver that claims peer access
while data never arrives (vllm-project/vllm#51513), hosts told apart by rank arithmetic (vllm-project/vllm#4903).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fabric.made import FAILS, blind, fabric_of, make_fabric, make_facts, with_one
from workbench.errors import ArgumentError
from workbench.fabric import (
    Allocator,
    Capability,
    Clique,
    Fabric,
    Outcome,
    Trial,
    Verdict,
    decide_capability,
    name_ranks,
    name_shares,
    simulated,
)
from workbench.ranks import GroupKey


def machine_group(name: str, *world_ranks: int) -> Fabric:
    machine = simulated(name)
    return Fabric(GroupKey("tp", world_ranks), tuple(machine.facts_of(r) for r in world_ranks))


def test_hosts_are_told_apart_by_host_id_alone() -> None:
    facts = make_facts(4)
    assert fabric_of(facts).same_host.ok
    moved = fabric_of((*facts[:3], replace(facts[3], host="boot-9")))  # the same node name, another kernel
    assert not moved.same_host.ok
    assert moved.same_host.evidence == (
        "world ranks 0..2: node0 (host boot-0)",
        "world rank 3: node0 (host boot-9)",
    )


def test_cards_bridged_in_pairs_are_connected_as_pairs_and_not_as_four() -> None:
    assert machine_group("pcie-pairs", 0, 1).nvlink.ok
    assert machine_group("pcie-pairs", 2, 3).nvlink.ok
    assert not machine_group("pcie-pairs", 0, 2).nvlink.ok
    assert machine_group("pcie-pairs", 0, 1, 2, 3).nvlink.reason == (
        "world ranks 0, 2 of node0 are not connected by NVLink"
    )


def test_what_could_not_be_read_is_told_beside_a_missing_link() -> None:
    fabric = make_fabric(2)
    unread = replace(fabric.facts[0].links[0], nvlink=False)
    found = with_one(fabric, 0, links=(unread,), notes=("nvml: no NVML",)).nvlink
    assert found.reason == ("world ranks 0, 1 of node0 are not connected by NVLink (nvml: no NVML)")


def test_peer_access_that_a_driver_claims_but_data_disproves_vetoes_the_group() -> None:
    fabric = make_fabric(4)
    broken = replace(fabric.facts[2].links[0], peer_access=FAILS)
    dropped = with_one(fabric, 2, links=(broken, *fabric.facts[2].links[1:]))
    assert dropped.p2p.reason == "peer access from world rank 2 to world rank 0 fails (read back other words)"
    assert [[v.ok for v in row] for row in dropped.p2p_matrix] == [
        [True, True, True, True],
        [True, True, True, True],
        [False, True, True, True],
        [True, True, True, True],
    ]


def test_a_pair_that_nobody_tried_is_not_taken_for_working() -> None:
    fabric = make_fabric(2)
    untried = with_one(fabric, 1, links=(replace(fabric.facts[1].links[0], peer_access=Trial(Outcome.UNTRIED, "x")),))
    assert untried.p2p.reason == "peer access from world rank 1 to world rank 0 untried (x)"
    unseen = with_one(fabric, 1, links=())
    assert unseen.p2p.reason == (
        "peer access from world rank 1 to world rank 0 untried "
        "(that device is not visible to world rank 1; let each rank see all GPUs of its host)"
    )


def test_the_matrix_says_nothing_of_pairs_across_hosts() -> None:
    fabric = make_fabric(4, num_hosts=2, clique=True)
    assert [[v.ok for v in row] for row in fabric.p2p_matrix] == [
        [True, True, False, False],
        [True, True, False, False],
        [False, False, True, True],
        [False, False, True, True],
    ]
    assert fabric.p2p_matrix[0][2].reason == "untried (another host)"


@pytest.mark.parametrize(
    ("clique", "reason"),
    [
        (
            Clique(state="completed", cluster_uuid="5a0c", clique_id=8, healthy=True),
            "in 2 NVLink cliques (world ranks 0..2: 5a0c clique 7; world rank 3: 5a0c clique 8)",
        ),
        (
            Clique(state="completed", cluster_uuid="77", clique_id=7, healthy=True),
            "in 2 NVLink cliques (world ranks 0..2: 5a0c clique 7; world rank 3: 77 clique 7)",
        ),
        (
            Clique(state="completed", cluster_uuid="5a0c", clique_id=7, healthy=False),
            "world rank 3 in no NVLink clique (state completed, degraded, cluster 5a0c, clique 7)",
        ),
    ],
)
def test_one_clique_needs_one_uuid_one_id_and_health_on_every_member(clique: Clique, reason: str) -> None:
    fabric = make_fabric(4, num_hosts=2, clique=True)
    assert fabric.one_clique.reason == "one NVLink clique (5a0c clique 7)"
    verdict = with_one(fabric, 3, clique=clique).one_clique
    assert (verdict.ok, verdict.reason) == (False, reason)


def test_members_that_differ_are_named() -> None:
    fabric = make_fabric(4, multicast=True)
    assert (fabric.arch.reason, fabric.allocator.reason) == ("sm90", "plain")
    assert with_one(fabric, 2, arch="sm100").arch.reason == (
        "mixed architectures (world ranks 0, 1, 3: sm90; world rank 2: sm100)"
    )
    assert with_one(fabric, 2, allocator=Allocator.VMM_FABRIC).allocator.reason == (
        "mixed allocators (world ranks 0, 1, 3: plain; world rank 2: vmm-fabric)"
    )
    assert with_one(fabric, 2, device="").devices.reason == "world rank 2 without a GPU"
    assert with_one(fabric, 2, device="GPU-0").devices.reason == "world ranks 0, 2 share device GPU-0"


def test_a_shared_device_serves_where_every_sharer_was_allowed_to() -> None:
    fabric = machine_group("h200x2", 0, 1)
    gpu = fabric.facts[0].device
    one = with_one(with_one(fabric, 1, device=gpu), 0, may_share=True)
    assert (one.devices.ok, one.nvlink.ok, one.p2p.ok, one.p2p_matrix[0][1].ok) == (False,) * 4
    both = with_one(one, 1, may_share=True)
    assert both.devices.reason == f"world ranks 0, 1 share device {gpu}, as WORKBENCH_SHARE_GPUS allows"
    assert (both.nvlink.ok, both.p2p.ok, both.ipc.ok) == (True, True, True)
    assert both.p2p_matrix[0][1] == Verdict(True, str(Trial(Outcome.WORKS, "the same GPU")))
    assert decide_capability(both, Capability.STAGED).ok


def test_a_fabric_survives_json_and_prints_on_one_line() -> None:
    fabric = machine_group("gb200-2x4", 0, 1, 4, 5)
    assert Fabric.from_json(fabric.to_json()) == fabric
    assert str(fabric) == (
        "tp[0,1,4,5]: sm100; same host no: on 2 hosts (world ranks 0, 1: node0; world ranks 4, 5: node1); "
        "one clique yes: one NVLink clique (gb200-2x4-fabric clique 0); NVLink yes: NVLink between all GPUs of a host; "
        "peer access yes: peer access tried and working between all GPUs of a host; allocator yes: plain; "
        "multicast no: world ranks 0, 1, 4, 5: multicast is off; WORKBENCH_MULTICAST=1 allows it"
    )


def test_facts_of_other_ranks_than_the_groups_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"tp\[1,0\]: facts of world ranks \[0, 1\]"):
        Fabric(GroupKey("tp", (1, 0)), make_facts(2))


def test_blind_facts_raise_when_read() -> None:
    """The instrument of the one-host tests works."""
    with pytest.raises(AssertionError, match="read clique"):
        _ = blind(make_fabric(2)).one_clique
    with pytest.raises(AssertionError, match="read allocator"):
        _ = blind(make_fabric(2)).allocator


def test_ranks_in_texts_are_drawn_together_from_three_on() -> None:
    assert name_ranks([3]) == "world rank 3"
    assert name_ranks([2, 0, 1, 8, 9]) == "world ranks 0..2, 8, 9"
    assert name_ranks(range(0, 40, 2)).endswith("28, 30 and 4 more")
    assert name_shares({"a": [1], "b": [0, 2]}) == "world rank 1: a; world ranks 0, 2: b"
