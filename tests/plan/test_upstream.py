"""Pins what engines decided before and after each of three fixes, and what became of variables and models.

Sources: sgl-project/sglang#21249 (context-parallel limit), vllm-project/vllm#35424, #41458, #43616, #45917 (the gate on
pipeline and data parallelism), sgl-project/sglang#32339, #32541, #35061 (widths across hosts, clique and allocator).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.fabric.made import make_fabric
from workbench.errors import ArgumentError
from workbench.fabric import Allocator, Fabric, simulated
from workbench.plan import (
    UPSTREAM_SYSTEMS,
    Ask,
    ask_upstream,
    decide_path,
    describe_situation,
    find_model,
    find_retired,
    listed_models,
    upstream_rules,
)
from workbench.ranks import GroupKey, GroupMap

ASK = Ask(hidden=7168, tokens=64)


def answers(system: str, topic: str, situation: dict[str, Any]) -> list[bool]:
    return [ask_upstream(rule, situation).ok for rule in upstream_rules(system, topic)]


def situation_of(group_map: GroupMap, machine: str, kind: str, **more: Any) -> dict[str, Any]:
    place = simulated(machine)
    key = group_map.keys(kind)[0]
    fabric = Fabric(key, tuple(place.facts_of(r) for r in key.world_ranks))
    hosts = {place.facts_of(r).host for r in range(group_map.world_size)}
    return describe_situation(group_map, fabric, ASK, num_hosts=len(hosts), **more)


def test_rules_are_kept_oldest_first() -> None:
    assert [[r.id for r in upstream_rules("sglang", t)] for t in ("custom_all_reduce", "fusion", "auto_enable")] == [
        ["one-host", "one-clique", "widths-2-to-8-across-hosts", "capability"],
        ["cp-limit", "subgroups"],
        ["sixteen-models", "seventeen-models"],
    ]
    assert [r.id for r in upstream_rules("vllm", "fusion")] == [
        "no-pp-no-dp",
        "gate-lifted",
        "no-pp",
        "group-passed",
        "sixteen-ranks",
    ]
    for system in UPSTREAM_SYSTEMS:
        for rule in upstream_rules(system, "fusion"):
            assert rule.source
            assert rule.cost
            assert "\n" not in str(rule)


def test_context_parallelism_was_refused_before_the_fix_and_not_after() -> None:
    with_cp = situation_of(GroupMap.build("sglang", tp=8, attn_cp=2), "b200x8", "attention_tp")
    without = situation_of(GroupMap.build("sglang", tp=8), "b200x8", "tp")
    assert answers("sglang", "fusion", with_cp) == [False, True]
    assert answers("sglang", "fusion", without) == [True, True]
    before = upstream_rules("sglang", "fusion")[0]
    assert ask_upstream(before, with_cp).reason == "attn_cp=2 is above 1: the fused workspace knew no subgroups"


def test_pipeline_and_data_parallelism_came_and_went() -> None:
    plain = situation_of(GroupMap.build("vllm", tp=4), "b200x8", "tp")
    with_pp = situation_of(GroupMap.build("vllm", tp=2, pp=2), "b200x8", "tp")
    with_dp = situation_of(GroupMap.build("vllm", tp=2, dp=2), "b200x8", "tp")
    assert answers("vllm", "fusion", plain) == [True, True, True, True, True]
    assert answers("vllm", "fusion", with_pp) == [False, True, False, True, True]
    assert answers("vllm", "fusion", with_dp) == [False, True, True, True, True]


def told_by_kind(group_map: GroupMap, topic: str) -> dict[str, list[bool]]:
    """What each version says of the first group of every kind of more than one rank, by kind."""
    kinds = [kind for kind, groups in group_map.groups.items() if len(groups[0]) > 1]
    return {kind: answers(group_map.system, topic, situation_of(group_map, "b200x8", kind)) for kind in kinds}


def test_vllm_fuses_over_its_tensor_parallel_group_alone() -> None:
    group_map = GroupMap.build("vllm", tp=2, dp=2, pp=2)
    assert told_by_kind(group_map, "fusion") == {
        "world": [False] * 5,
        "tp": [False, True, False, True, True],
        "pp": [False] * 5,
        "dp": [False] * 5,
    }
    for rule in upstream_rules("vllm", "fusion"):
        verdict = ask_upstream(rule, situation_of(group_map, "b200x8", "dp"))
        assert str(verdict) == "no: it works on tp groups alone, and this one is dp"


def test_sglang_fuses_over_attention_and_expert_groups_and_each_group_is_found_by_its_other_names() -> None:
    # cp-limit, subgroups
    assert told_by_kind(GroupMap.build("sglang", tp=8, moe_ep=2), "fusion") == {
        "world": [False, False],
        "tp": [True, True],  # also attention_tp
        "moe_ep": [False, True],
        "moe_tp": [False, False],  # beside moe_ep
    }
    assert told_by_kind(GroupMap.build("sglang", tp=8, attn_cp=2, moe_ep=4), "fusion") == {
        "world": [False, False],
        "tp": [False, False],
        "attn_cp": [False, False],
        "attention_tp": [False, True],
        "moe_ep": [False, True],
        "moe_tp": [False, False],
    }
    assert told_by_kind(GroupMap.build("sglang", tp=8), "fusion")["tp"] == [True, True]  # also attention_tp, moe_tp


def test_sglangs_custom_all_reduce_is_not_made_for_expert_groups_nor_the_world() -> None:
    assert told_by_kind(GroupMap.build("sglang", tp=4, attn_cp=2, moe_ep=2, pp=2), "custom_all_reduce") == {
        "world": [False] * 4,
        "tp": [True] * 4,
        "attn_cp": [True] * 4,
        "attention_tp": [False] * 4,
        "moe_ep": [False] * 4,
        "moe_tp": [False] * 4,
        "pp": [False] * 4,
    }
    attention = situation_of(GroupMap.build("sglang", tp=4, attn_cp=2), "b200x8", "attention_tp")
    verdict = ask_upstream(upstream_rules("sglang", "custom_all_reduce")[-1], attention)
    assert verdict.reason.endswith("later versions let them have it")


MIB = 1 << 20
VLLM_SIZES = [
    # FI_ALLREDUCE_FUSION_MAX_SIZE_MB of 0.24.0 and 0.33.0, in bytes; None: no entry, never fused
    ("sm90", 2, 64 * MIB, 64 * MIB),
    ("sm90", 4, 2 * MIB, 2 * MIB),
    ("sm90", 8, MIB // 2, MIB // 2),
    ("sm90", 16, None, None),
    ("sm100", 2, 64 * MIB, 64 * MIB),
    ("sm100", 4, 32 * MIB, 32 * MIB),
    ("sm100", 8, MIB, MIB),
    ("sm100", 16, None, 64 * MIB),
    ("sm103", 2, 64 * MIB, 64 * MIB),
    ("sm103", 4, 64 * MIB, 64 * MIB),
    ("sm103", 8, 2 * MIB, 4 * MIB),
    ("sm103", 16, None, 64 * MIB),
    ("sm100", 3, None, None),
]


@pytest.mark.parametrize(("arch", "tp", "earlier", "later"), VLLM_SIZES)
def test_vllm_fuses_up_to_its_published_size_and_not_one_byte_more(
    arch: str, tp: int, earlier: int | None, later: int | None
) -> None:
    rules = {rule.id: rule for rule in upstream_rules("vllm", "fusion")}
    for rule, limit in ((rules["group-passed"], earlier), (rules["sixteen-ranks"], later)):
        situation = {"kinds": ("tp",), "arch": arch, "tp": tp, "message_bytes": limit or 1}
        assert ask_upstream(rule, situation).ok is (limit is not None)
        assert not ask_upstream(rule, {**situation, "message_bytes": (limit or 1) + 1}).ok


def test_vllms_size_limit_is_told_with_its_name_and_version_whether_it_fuses_or_not() -> None:
    rule = next(r for r in upstream_rules("vllm", "fusion") if r.id == "group-passed")

    def told(arch: str, tp: int, size: int) -> str:
        return ask_upstream(rule, {"kinds": ("tp",), "arch": arch, "tp": tp, "message_bytes": size}).reason

    table = "FI_ALLREDUCE_FUSION_MAX_SIZE_MB of 0.24.0"
    assert told("sm100", 8, 2048 * 7168 * 2) == (
        f"28 MiB a rank is above the 1 MiB up to which tp=8 is fused on sm100 ({table}; "
        "pass_config.fi_allreduce_fusion_max_size_mb sets another limit)"
    )
    assert told("sm100", 4, 4 * MIB) == (
        f"every condition holds; 4 MiB a rank is within the 32 MiB up to which tp=4 is fused on sm100 ({table}), "
        "in one shot by FlashInfer's trtllm backend (one shot up to 4 MiB)"
    )
    assert told("sm100", 4, 4 * MIB + 2).endswith("in two shots by FlashInfer's trtllm backend (one shot up to 4 MiB)")
    assert told("sm100", 16, 2) == f"tp=16 is not fused at any size on sm100 ({table} has tp 2, 4, 8)"
    assert told("sm80", 8, 2) == "sm80 is neither Hopper nor Blackwell"
    assert told("sm90", 1, 2) == "tp=1: nothing to reduce"
    with pytest.raises(ArgumentError, match="asks for 'message_bytes', which the situation does not tell"):
        ask_upstream(rule, {"kinds": ("tp",), "arch": "sm90", "tp": 8})


def test_every_architecture_that_vllm_fuses_on_has_its_sizes() -> None:
    for rule in upstream_rules("vllm", "fusion"):
        assert rule.sizes is not None
        arches = next(c.value for c in rule.requires if c.fact == "arch")
        assert set(arches) == set(rule.sizes.fuses) & set(rule.sizes.one_shot) & set(arches)
        assert rule.sizes.source.startswith("vllm/compilation/passes/fusion/allreduce_rms_fusion.py of 0.")


@pytest.mark.parametrize(
    ("size", "num_hosts", "clique", "allocator", "expected"),
    [
        # one-host, one-clique, widths-2-to-8-across-hosts, capability
        (8, 1, False, "plain", [True, True, True, True]),
        (8, 2, True, "vmm-fabric", [False, True, True, True]),
        (8, 2, True, "plain", [False, True, False, False]),  # two trays of four at TP8: the 18 %
        (16, 4, True, "vmm-fabric", [False, True, False, True]),  # TP16, lost to a policy and given back
        (16, 4, True, "plain", [False, True, False, False]),
        (16, 4, False, "vmm-fabric", [False, False, False, False]),
        (12, 1, False, "plain", [False, True, True, False]),
    ],
)
def test_groups_across_hosts_version_by_version(
    size: int, num_hosts: int, clique: bool, allocator: str, expected: list[bool]
) -> None:
    fabric = make_fabric(size, num_hosts=num_hosts, clique=clique, allocator=Allocator(allocator), arch="sm100")
    group_map = GroupMap.build("sglang", tp=size)
    situation = describe_situation(group_map, fabric, ASK, num_hosts=num_hosts)
    assert answers("sglang", "custom_all_reduce", situation) == expected


FOUR_ROWS = [
    # (same node, one clique, VMM memory) -> capable upstream, since sgl-project/sglang#35061; our choice for 16 ranks
    ((True, False, False), True, "custom.fused.push"),
    ((False, True, True), True, "custom.fused.push"),
    ((False, True, False), False, "custom.fused.push"),  # the staged path needs no VMM memory of the allocator's
    ((False, False, True), False, "nccl"),
]


@pytest.mark.parametrize(("row", "upstream", "ours"), FOUR_ROWS)
def test_the_four_rows_of_the_capability_test_upstream(row: tuple[bool, bool, bool], upstream: bool, ours: str) -> None:
    same_node, clique, vmm = row
    allocator = Allocator.VMM_FABRIC if vmm else Allocator.PLAIN
    fabric = make_fabric(16, num_hosts=1 if same_node else 4, clique=clique, allocator=allocator, arch="sm100")
    situation = describe_situation(GroupMap.build("sglang", tp=16), fabric, ASK, num_hosts=1 if same_node else 4)
    assert ask_upstream(upstream_rules("sglang", "custom_all_reduce")[-1], situation).ok is upstream
    assert decide_path(fabric, Ask(hidden=7168, tokens=1)).choice == ours


def test_every_reason_against_is_told_and_the_cost_with_it() -> None:
    fabric = make_fabric(16, num_hosts=2, arch="sm90")
    situation = describe_situation(GroupMap.build("sglang", tp=16), fabric, ASK, num_hosts=2)
    verdict = ask_upstream(upstream_rules("sglang", "custom_all_reduce")[-1], situation)
    assert verdict.reason == (
        "no tuned row for 16 ranks on sm90; the group crosses hosts and is not one NVLink clique; "
        "the group crosses hosts and the caching allocator is not VMM-backed"
    )
    assert "220.7 to 180.0 tokens/s" in verdict.evidence[1]


@pytest.mark.parametrize(
    ("model", "machine", "sizes", "reason"),
    [
        ("Qwen3MoeForCausalLM", "h100x8", {"tp": 8}, ""),
        ("DeepseekV4", "gb200-2x4", {"tp": 8}, ""),
        ("Llama", "h100x8", {"tp": 8}, "Llama is not on the list of models"),
        ("GptOss", "ib-2x8", {"tp": 16}, "2 hosts of sm90: several hosts need Blackwell"),
        ("GptOss", "h100x8", {"tp": 1}, "tp=1: nothing to reduce"),
        ("GptOss", "h100x8", {"tp": 8, "attn_dp": 2}, "DP attention is on"),
    ],
)
def test_the_list_of_models(model: str, machine: str, sizes: dict[str, int], reason: str) -> None:
    name, _ = find_model(model)
    situation = situation_of(GroupMap.build("sglang", **sizes), machine, "tp", model=name)
    verdict = ask_upstream(upstream_rules("sglang", "auto_enable")[-1], situation)
    assert verdict.ok == (reason == "")
    assert reason in verdict.reason


def test_models_are_known_by_their_several_spellings() -> None:
    assert len(listed_models()) == 17
    for spelling in ("DeepseekV3", "DeepseekV3ForCausalLM", "deepseek_v3", " deepseek-v3 "):
        assert find_model(spelling) == ("DeepseekV3", "")
    assert find_model("Qwen3Next2") == ("Qwen3Next2", "nearest listed: Qwen3Next")
    assert find_model("Llama") == ("Llama", "")
    earlier = upstream_rules("sglang", "auto_enable")[0].requires[0].value
    assert set(listed_models()) - set(earlier) == {"DeepseekV4"}


def test_variables_that_no_longer_do_anything_are_told() -> None:
    names = ["PATH", "SGLANG_ENABLE_CUSTOM_ALL_REDUCE_V2_MULTINODE", "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2"]
    assert [str(v) for v in find_retired(names)] == [
        "SGLANG_ENABLE_CUSTOM_ALL_REDUCE_V2_MULTINODE is set and does nothing since 2026-08-16, "
        "sgl-project/sglang#35061 (sglang); SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2 is the one switch there, "
        "WORKBENCH_CUSTOM_ALL_REDUCE here"
    ]
    assert find_retired(["SGLANG_FLASHINFER_FORCE_POSIX_FD_TRANSPORT"])


def test_a_situation_that_lacks_a_fact_is_refused_by_name() -> None:
    rule = upstream_rules("sglang", "fusion")[0]
    with pytest.raises(ArgumentError, match="asks for 'dp_attention', which the situation does not tell"):
        ask_upstream(rule, {"kinds": ("tp",), "arch": "sm90"})
    with pytest.raises(ArgumentError, match="no rules for 'megatron' 'fusion'; there are sglang custom_all_reduce"):
        upstream_rules("megatron", "fusion")


def test_situations_name_the_group_that_was_asked_about() -> None:
    group_map = GroupMap.build("sglang", tp=8, attn_cp=2)
    situation = situation_of(group_map, "b200x8", "attention_tp")
    assert (situation["group_size"], situation["tp"], situation["attn_cp"]) == (4, 8, 2)
    assert group_map.keys("attention_tp")[0] == GroupKey("attention_tp", (0, 1, 2, 3))
