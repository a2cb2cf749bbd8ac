"""sgl-project/sglang#36429 (after #35061).

Symptom: two hosts of one NVLink clique lose the custom path with the default allocator, 18 % of their throughput.
Cause: the rule for the whole path asks for a VMM-backed allocator, which graph zero-copy alone needs. The old rule is
kept as data; the machine is simulated.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from workbench.fabric import NO_CLIQUE, Allocator, Capability, Fabric, Outcome, Trial, decide_capability, simulated
from workbench.plan import Ask, ask_upstream, decide_path, describe_situation, upstream_rules
from workbench.ranks import GroupMap

ASK = Ask(hidden=7168, tokens=8)
TP8 = GroupMap.build("sglang", tp=8)


def _fabric(*, clique: bool, vmm: bool) -> Fabric:
    machine = simulated("gb200-2x4")
    facts = [machine.facts_of(r) for r in range(8)]
    if vmm:
        facts = [replace(f, allocator=Allocator.VMM_FABRIC) for f in facts]
    if not clique:
        facts = [replace(f, clique=NO_CLIQUE, vmm_fabric=Trial(Outcome.FAILS, "no clique")) for f in facts]
    return Fabric(TP8.group_of("tp", 0), tuple(facts))


def test_old_the_rule_refuses_a_valid_clique_for_its_allocator() -> None:
    rule = next(r for r in upstream_rules("sglang", "custom_all_reduce") if r.id == "capability")
    situation = describe_situation(TP8, _fabric(clique=True, vmm=False), ASK, num_hosts=2)
    verdict = ask_upstream(rule, situation)
    assert (verdict.ok, verdict.reason) == (
        False,
        "the group crosses hosts and the caching allocator is not VMM-backed",
    )


@pytest.mark.parametrize(
    ("clique", "vmm", "choice", "zero_copy"),
    [
        (True, True, "custom.fused.two_shot_push", True),
        (True, False, "custom.fused.two_shot_push", False),
        (False, True, "nccl", False),
        (False, False, "nccl", False),
    ],
)
def test_the_clique_decides_the_path_and_the_allocator_the_zero_copy(clique, vmm, choice: str, zero_copy: bool) -> None:
    fabric = _fabric(clique=clique, vmm=vmm)
    assert decide_path(fabric, ASK).choice == choice
    assert decide_capability(fabric, Capability.GRAPH_ZERO_COPY_VMM).ok is zero_copy


def test_what_the_allocator_costs_is_said_with_the_switch_that_changes_it() -> None:
    verdict = decide_capability(_fabric(clique=True, vmm=False), Capability.GRAPH_ZERO_COPY_VMM)
    assert verdict.reason == (
        "world ranks 0..7: the allocator's memory is plain, not vmm-fabric; expandable_segments:True in "
        "PYTORCH_ALLOC_CONF gives such memory"
    )


def test_without_a_clique_the_reason_names_it() -> None:
    rejected = dict(decide_path(_fabric(clique=False, vmm=True), ASK).rejected)
    assert "world ranks 0..7 in no NVLink clique" in rejected["custom"]
