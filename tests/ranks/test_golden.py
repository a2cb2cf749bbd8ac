"""Small layouts a person can check by hand, written out. SGLang's first row is also its own topology test."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.errors import LayoutError
from workbench.ranks import GroupMap

EIGHT = ["0", "1", "2", "3", "4", "5", "6", "7"]

GOLDEN_SGLANG = [
    (
        {"tp": 8, "attn_cp": 2, "moe_ep": 4, "moe_dp": 2},
        {
            "attn_cp": ["04", "15", "26", "37"],
            "attention_tp": ["0123", "4567"],
            "moe_ep": ["0123", "4567"],
            "moe_tp": EIGHT,
            "moe_dp": ["04", "15", "26", "37"],
        },
        {},
    ),
    (
        {"tp": 8, "attn_dp": 2, "attn_cp": 2, "moe_ep": 2, "moe_dp": 2},
        {
            "attn_cp": ["02", "13", "46", "57"],
            "attention_tp": ["01", "23", "45", "67"],
            "moe_ep": ["02", "13", "46", "57"],
            "moe_tp": ["01", "23", "45", "67"],
            "moe_dp": ["04", "15", "26", "37"],
        },
        {},
    ),
    (
        {"tp": 4, "pp": 2, "attn_cp": 2, "moe_ep": 2, "moe_dp": 1},
        {
            "tp": ["0123", "4567"],
            "attn_cp": ["02", "13", "46", "57"],
            "attention_tp": ["01", "23", "45", "67"],
            "moe_ep": ["02", "13", "46", "57"],
            "moe_tp": ["01", "23", "45", "67"],
            "pp": ["04", "15", "26", "37"],
        },
        {"moe_dp": "attn_cp"},
    ),
    (
        {"tp": 8, "moe_ep": 2},
        {
            "tp": ["01234567"],
            "attn_cp": EIGHT,
            "moe_ep": ["04", "15", "26", "37"],
            "moe_tp": ["0123", "4567"],
            "moe_dp": EIGHT,
        },
        {"attention_tp": "tp"},
    ),
    (
        {"tp": 8, "dcp": 2},
        {"attn_cp": EIGHT, "moe_ep": EIGHT, "moe_dp": EIGHT, "dcp": ["01", "23", "45", "67"]},
        {"attention_tp": "tp", "moe_tp": "tp"},
    ),
]


def ranks_of(texts: list[str]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(digit) for digit in text) for text in texts)


@pytest.mark.parametrize(("sizes", "groups", "aliases"), GOLDEN_SGLANG)
def test_sglang_golden_rows(sizes: dict[str, int], groups: dict[str, list[str]], aliases: dict[str, str]) -> None:
    group_map = GroupMap.build("sglang", launch_checks=False, **sizes)
    assert {kind: group_map.groups[kind] for kind in groups} == {kind: ranks_of(row) for kind, row in groups.items()}
    assert group_map.aliases == aliases


def test_sglang_ep_and_moe_tp_of_equal_size_have_different_peers() -> None:
    group_map = GroupMap.build("sglang", tp=4, moe_ep=2)
    assert group_map.groups["moe_ep"] == ((0, 2), (1, 3))
    assert group_map.groups["moe_tp"] == ((0, 1), (2, 3))
    assert group_map.group_of("moe_ep", 0) != group_map.group_of("moe_tp", 0)


def test_sglang_alias_chain_ends_at_the_owner() -> None:
    group_map = GroupMap.build("sglang", tp=4, attn_cp=4)
    assert group_map.aliases["moe_dp"] == "tp"


def test_sglang_shared_experts_are_the_attention_tp_groups_when_equally_wide() -> None:
    same = GroupMap.build("sglang", tp=8, attn_dp=2, moe_ep=8, shared_experts_tp=4)
    assert same.aliases["shared_experts_tp"] == "attention_tp"
    narrower = GroupMap.build("sglang", tp=8, attn_dp=2, moe_ep=8, shared_experts_tp=2)
    assert narrower.groups["shared_experts_tp"] == ((0, 1), (2, 3), (4, 5), (6, 7))
    whole = GroupMap.build("sglang", tp=4, moe_ep=4, shared_experts_tp=4)
    assert whole.aliases["shared_experts_tp"] == "tp"


def test_sglang_moe_dp_needs_one_pipeline_stage_at_launch_only() -> None:
    sizes: dict[str, Any] = {"tp": 4, "pp": 2, "attn_cp": 2, "moe_dp": 2}
    assert GroupMap.build("sglang", launch_checks=False, **sizes).groups["moe_dp"] == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert GroupMap.build("sglang", launch_checks=False, **sizes).launch_problem == (
        "moe_dp=2 with pp=2; allowed: moe_dp > 1 only with pp=1"
    )


def test_sglang_dcp_below_one_is_off_for_the_builder_and_refused_at_launch() -> None:
    group_map = GroupMap.build("sglang", launch_checks=False, tp=4, dcp=0)
    assert group_map.launch_problem == "dcp=0 is below 1; allowed: 1 (off) or a divisor of tp=4"
    assert "dcp" in group_map.absent


def test_vllm_dcp_reads_pcp_first_and_so_leaves_ascending_order() -> None:
    group_map = GroupMap.build("vllm", tp=2, pcp=2, dcp=4)
    assert group_map.groups["dcp"] == ((0, 2, 1, 3),)
    assert group_map.numbering_differs == ("dcp",)
    key = group_map.group_of("dcp", 2)
    assert (key.group_rank(2), key.torch_rank(2)) == (1, 2)


def test_vllm_pipeline_lists_follow_tp_outside_pcp() -> None:
    assert GroupMap.build("vllm", tp=2, pcp=2).groups["pp"] == ((0,), (2,), (1,), (3,))


def test_vllm_eplb_repeats_the_ep_lists_without_being_an_alias() -> None:
    group_map = GroupMap.build("vllm", tp=2, dp=2, moe=True, eplb=True)
    assert group_map.groups["eplb"] == group_map.groups["ep"] == ((0, 1, 2, 3),)
    assert "eplb" not in group_map.aliases
    assert group_map.group_of("eplb", 0) != group_map.group_of("ep", 0)


def test_vllm_without_experts_has_no_ep() -> None:
    assert GroupMap.build("vllm", tp=2, eplb=True).absent == ("ep", "eplb", "edp")


def test_vllm_world_beyond_the_sizes_means_outer_replicas() -> None:
    assert GroupMap.build("vllm", tp=2, world=6) == GroupMap.build("vllm", tp=2, ext_dp=3)


def test_vllm_gpu_engram_tables_over_dp_alone_ignore_nodes() -> None:
    tables = {"cpu_offload": False, "across_dp": True}
    assert GroupMap.build("vllm", dp=4, nodes=2, engram=tables).aliases["edp"] == "dp"
    assert GroupMap.build("vllm", tp=2, dp=4, nodes=2, engram=tables).groups["edp"] == ((0, 2), (4, 6), (1, 3), (5, 7))


def test_vllm_elastic_engines_count_their_own_ranks() -> None:
    group_map = GroupMap.build("vllm", tp=2, dp=2, moe=True, eplb=True, elastic_ep=True)
    assert group_map.local_numbering == ("tp", "dcp", "pcp", "pp")
    assert group_map.groups["tp"] == ((0, 1),)
    assert group_map.groups["dp"] == ((0, 2), (1, 3))
    assert "world" not in group_map.kinds
    assert group_map.world_size == 4


def test_vllm_elastic_ep_needs_eplb_and_one_stage_at_launch() -> None:
    assert "eplb" in str(GroupMap.build("vllm", launch_checks=False, tp=2, moe=True, elastic_ep=True).launch_problem)
    staged = GroupMap.build("vllm", launch_checks=False, tp=2, pp=2, moe=True, eplb=True, elastic_ep=True)
    assert "pp=1" in str(staged.launch_problem)


def test_megatron_order_moves_the_axes() -> None:
    stage_last = GroupMap.build("megatron", world=8, tp=2, pp=2)
    assert stage_last.groups["dp"] == ((0, 2), (1, 3), (4, 6), (5, 7))
    stage_inside = GroupMap.build("megatron", world=8, tp=2, pp=2, order="tp-cp-ep-pp-dp")
    assert stage_inside.groups["dp"] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert stage_inside.groups["pp"] == ((0, 2), (1, 3), (4, 6), (5, 7))


@pytest.mark.parametrize("order", ["tp-pp-cp-ep-dp", "TP-CP-EP-DP-PP"])
def test_megatron_asks_for_pp_last_in_small_letters_when_dense_and_expert_dp_differ(order: str) -> None:
    with pytest.raises(LayoutError, match="does not end in pp, and dp=2 differs from the experts' dp=4"):
        GroupMap.build("megatron", world=16, tp=2, cp=2, pp=2, order=order)


def test_megatron_optimizer_instances_divide_the_expert_dp_too() -> None:
    with pytest.raises(LayoutError, match="does not divide dp\\*cp = 8 and the experts' dp = 1"):
        GroupMap.build("megatron", world=8, ep=8, optimizer_instances=2)


def test_megatron_embedding_groups_hold_outer_stages_only() -> None:
    group_map = GroupMap.build("megatron", world=4, pp=4)
    assert group_map.groups["pp"] == ((0, 1, 2, 3),)
    assert group_map.groups["embd"] == ((0, 3),)
    assert group_map.groups["pos_embd"] == ((0,),)


def test_megatron_hierarchical_cp_levels() -> None:
    group_map = GroupMap.build("megatron", cp=8, hierarchical_cp=[2, 2, 2])
    assert group_map.groups["hcp_level0"] == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert group_map.groups["hcp_level1"] == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert group_map.groups["hcp_level2"] == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_megatron_hybrid_cp_cuts_powers_of_two_below_the_list() -> None:
    group_map = GroupMap.build("megatron", world=10, hybrid_cp=True)
    assert group_map.groups["hybrid_dp_cp_4"] == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9))
    assert "hybrid_dp_cp_8" not in group_map.kinds


def test_megatron_all_gather_twin_is_created_between_device_and_cpu_group() -> None:
    group_map = GroupMap.build("megatron", world=2, all_gather_group=True)
    assert list(group_map.creation_order())[:3] == [
        ("dp_cp", "device", (0, 1)),
        ("dp_cp_ag", "device", (0, 1)),
        ("dp_cp", "cpu", (0, 1)),
    ]


def test_megatron_interleaved_schedule_needs_stages() -> None:
    assert GroupMap.build("megatron", pp=2, vpp=2).groups["pp"] == ((0, 1),)
