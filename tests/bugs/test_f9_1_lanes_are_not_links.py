"""vllm-project/vllm#4159 (#3974).

Symptom: loading hangs on four PCIe cards that are bridged in pairs. Cause: each card was asked whether its NVLink lanes
are up, which they are, and not whether each pair is connected. Modelled on the simulated machine of that shape.
"""

from __future__ import annotations

from workbench.fabric import Fabric, simulated
from workbench.plan import Ask, decide_path
from workbench.ranks import GroupKey

CARDS = tuple(simulated("pcie-pairs").facts_of(r) for r in range(4))


def _fabric(*ranks: int) -> Fabric:
    return Fabric(GroupKey("tp", ranks), tuple(CARDS[r] for r in ranks))


def test_old_every_card_has_lanes_up_so_four_are_taken_for_connected() -> None:
    assert all(any(link.nvlink for link in card.links) for card in CARDS)  # right: False for the four


def test_pairs_are_connected_and_four_are_not() -> None:
    assert _fabric(0, 1).nvlink.ok
    assert _fabric(2, 3).nvlink.ok
    assert not _fabric(1, 2).nvlink.ok
    four = _fabric(0, 1, 2, 3).nvlink
    assert (four.ok, four.reason) == (False, "world ranks 0, 2 of node0 are not connected by NVLink")


def test_a_pair_takes_the_custom_path_and_four_the_library_with_the_reason() -> None:
    ask = Ask(hidden=4096, tokens=8)
    assert decide_path(_fabric(0, 1), ask).choice == "custom.fused.push"
    plan = decide_path(_fabric(0, 1, 2, 3), ask)
    assert plan.choice == "nccl"
    assert dict(plan.rejected)["custom"] == "world ranks 0, 2 of node0 are not connected by NVLink"
