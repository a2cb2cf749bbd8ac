"""Pins what a rank says of itself: JSON there and back, one line in print, and no trust in a peer's document."""

from __future__ import annotations

import json

import pytest

from tests.fabric.made import CLIQUE, make_facts
from workbench.errors import ArgumentError
from workbench.fabric import NO_CLIQUE, Allocator, Clique, Facts


def test_facts_survive_json() -> None:
    facts = make_facts(4, num_hosts=2, clique=True, allocator=Allocator.VMM_FABRIC, multicast=True)
    for one in facts:
        assert Facts.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_a_cpu_ranks_facts_survive_json_and_name_no_device() -> None:
    facts = Facts(world_rank=3, host="boot-0", node="node0", notes=("no NVIDIA driver answers",))
    assert Facts.from_json(facts.to_json()) == facts
    assert str(facts) == "world rank 3 on node0: CPU"


def test_facts_print_on_one_line() -> None:
    facts = make_facts(4, num_hosts=2, clique=True)[3]
    assert str(facts) == (
        "world rank 3 on node1: H200 GPU-3 sm90, 132 SMs; NVLink to 1 and peer access to 1 of 1 devices; "
        "state completed, cluster 5a0c, clique 7; allocator plain; multicast forbidden"
    )


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("schema", 2, "schema is 2; allowed: a whole number from 1 to 1"),
        ("world_rank", -1, "world_rank is -1"),
        ("world_rank", True, "world_rank is true"),
        ("arch", "sm9x", "arch is 'sm9x'"),
        ("allocator", "cuda", "allocator is 'cuda'; allowed: one of none, plain, vmm-posix-fd, vmm-fabric"),
        ("links", {}, "links is an object; allowed: a list"),
        ("links", [1], "links[0]: 1 stands here"),
        ("clique", {"state": "completed"}, "clique: field 'cluster_uuid' is missing"),
        ("node", "a\nb", "node is 'a\\nb'; allowed: one line"),
        ("hots", "x", "unknown field 'hots'; nearest name: 'host'"),
    ],
)
def test_a_document_of_another_shape_is_refused_by_field(field: str, value: object, told: str) -> None:
    data = {**make_facts(2)[0].to_json(), field: value}
    with pytest.raises(ArgumentError) as refused:
        Facts.from_json(data)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("clique", "usable"),
    [
        (CLIQUE, True),
        (NO_CLIQUE, False),
        (Clique(state="in progress", cluster_uuid="5a0c", clique_id=7, healthy=True), False),
        (Clique(state="completed", cluster_uuid="5a0c", clique_id=7, healthy=False), False),
        # What HGX hosts report: a completed fabric that ends at the host.
        (
            Clique(state="completed", cluster_uuid="00000000-0000-0000-0000-000000000000", clique_id=0, healthy=True),
            False,
        ),
    ],
)
def test_a_clique_counts_only_if_completed_healthy_and_with_a_cluster_uuid(clique: Clique, usable: bool) -> None:
    assert clique.usable is usable
