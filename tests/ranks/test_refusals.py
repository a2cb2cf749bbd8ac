"""Input that makes no sense gives one LayoutError at once: what was asked, what is allowed, what is nearest."""

from __future__ import annotations

import pickle
import time
from typing import Any

import pytest

from workbench.errors import LayoutError
from workbench.ranks import MAX_WORLD_SIZE, SYSTEMS, GroupMap
from workbench.ranks.engine_names import NAMES

HOSTILE = ["8", 8.0, True, None, -1, 0, 10**12, 10**5000, float("nan"), b"8", [8], {"tp": 8}, object(), "x" * 10**6]
WIDTHS = {
    "sglang": ["tp", "pp", "attn_dp", "attn_cp", "moe_ep", "moe_dp"],
    "vllm": ["tp", "pp", "pcp", "dp", "ext_dp", "nodes"],
    "megatron": ["tp", "cp", "pp", "ep", "optimizer_instances"],
}


def refusal_of(system: str, name: str, value: Any) -> str | None:
    """The text of the LayoutError, or None for a legal value. Any other error fails the test."""
    try:
        GroupMap.build(system, launch_checks=False, **{name: value})
    except LayoutError as error:
        return str(error)
    return None


OTHER = {
    "sglang": ["dcp", "shared_experts_tp", "pdmux", "world"],
    "vllm": ["dcp", "moe", "eplb", "engram", "elastic_ep", "world"],
    "megatron": ["world", "etp", "order", "hybrid_cp", "hierarchical_cp", "all_gather_group", "vpp"],
}


@pytest.mark.parametrize(("system", "name"), [(system, name) for system, names in WIDTHS.items() for name in names])
def test_a_width_takes_whole_numbers_only(system: str, name: str) -> None:
    for value in HOSTILE:
        for launch_checks in (True, False):
            with pytest.raises(LayoutError, match=f"{name}=.*nearest legal choice: {name}=") as caught:
                GroupMap.build(system, launch_checks=launch_checks, **{name: value})
            assert len(str(caught.value)) < 400


@pytest.mark.parametrize(("system", "name"), [(system, name) for system, names in OTHER.items() for name in names])
def test_no_value_of_any_other_size_gives_another_error(system: str, name: str) -> None:
    refusals = [text for value in HOSTILE if (text := refusal_of(system, name, value)) is not None]
    assert len(refusals) >= 10
    assert all(name in text and len(text) < 400 for text in refusals)


@pytest.mark.parametrize("system", ["sglang", "vllm", "megatron"])
def test_widths_that_only_together_are_too_wide_are_refused_fast(system: str) -> None:
    start = time.monotonic()
    with pytest.raises(
        LayoutError, match=f"a world of .* ranks is wider than a map can be; allowed: at most {1 << 17}"
    ):
        GroupMap.build(system, tp=MAX_WORLD_SIZE, pp=MAX_WORLD_SIZE)
    assert time.monotonic() - start < 5


def test_an_unknown_size_names_the_nearest() -> None:
    with pytest.raises(
        LayoutError, match=r"sglang has no size 'atn_cp'; known sizes: tp, pp, .*nearest name: 'attn_cp'"
    ):
        GroupMap.build("sglang", tp=8, atn_cp=2)


def test_a_size_of_another_system_is_unknown() -> None:
    with pytest.raises(LayoutError, match="vllm has no size 'attn_cp'"):
        GroupMap.build("vllm", tp=8, attn_cp=1)


@pytest.mark.parametrize("system", ["SGLang", "", None, 3, ["sglang"], b"vllm"])
def test_an_unknown_system_is_refused(system: Any) -> None:
    with pytest.raises(LayoutError, match="known systems: sglang, vllm, megatron"):
        GroupMap.build(system, tp=2)


def test_the_nearest_system_is_named() -> None:
    with pytest.raises(LayoutError, match="nearest name: 'sglang'"):
        GroupMap.build("SGLang", tp=2)


def test_launch_checks_is_a_flag() -> None:
    with pytest.raises(LayoutError, match="launch_checks='no' is not legal; allowed: True or False"):
        GroupMap.build("sglang", launch_checks="no", tp=2)  # type: ignore[arg-type]  # the claim


@pytest.mark.parametrize(
    ("system", "sizes", "message"),
    [
        (
            "sglang",
            {"tp": 6, "attn_cp": 4},
            "sglang refuses: tp=6 cannot be cut into attn_dp=1 * attn_cp=4 attention groups; allowed: attn_dp*attn_cp "
            "divides tp; nearest legal choice: attn_cp=3 (asked 4), or tp=4 (asked 6)",
        ),
        (
            "sglang",
            {"tp": 4, "world": 8},
            "sglang refuses: a world of 8 ranks is not tp*pp = 4; allowed: world = tp*pp; "
            "nearest legal choice: tp=8 (asked 4), or pp=2 (asked 1), or world=4 (asked 8)",
        ),
        (
            "vllm",
            {"tp": 2, "pcp": 3, "dcp": 2},
            "vllm refuses by the launch checks: dcp=2 with pcp=3, tp=2; allowed: 1, 3, 6; "
            "nearest legal choice: pcp=2 (asked 3), or dcp=1 (asked 2)",
        ),
        (
            "megatron",
            {"world": 8, "tp": 2, "pp": 2, "ep": 3},
            "megatron refuses: world=8 is not a multiple of etp*ep*pp = 12; allowed: multiples of 12; "
            "nearest legal choice: world=12 (asked 8), or ep=2 (asked 3)",
        ),
        (
            "megatron",
            {"pp": 1, "vpp": 2},
            "megatron refuses: vpp=2 with pp=1; allowed: virtual stages only with pp > 1; "
            "nearest legal choice: pp=2 (asked 1)",
        ),
    ],
)
def test_a_refusal_says_what_is_allowed_and_nearest(system: str, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        GroupMap.build(system, **sizes)
    assert str(caught.value).startswith(message)


def test_the_nearest_choices_are_data_too_and_each_alone_is_legal() -> None:
    sizes = {"tp": 6, "attn_cp": 4}
    with pytest.raises(LayoutError) as caught:
        GroupMap.build("sglang", **sizes)
    assert caught.value.nearest == (("attn_cp", 3), ("tp", 4))
    for name, value in caught.value.nearest:
        GroupMap.build("sglang", **{**sizes, name: value})
    with pytest.raises(LayoutError) as caught:
        GroupMap.build("sglang", tp=0)
    assert caught.value.nearest == (("tp", 1),)
    assert pickle.loads(pickle.dumps(caught.value)).nearest == (("tp", 1),)  # ranks send their errors


@pytest.mark.parametrize("order", ["", "tp", "tp-tp-dp", "tp-dp-xx", "tp dp pp", "-", "tp-cp-ep-dp-"])
def test_megatron_order_names_each_wide_axis_once(order: str) -> None:
    with pytest.raises(LayoutError, match="order"):
        GroupMap.build("megatron", world=8, tp=2, pp=2, order=order)


@pytest.mark.parametrize("levels", [[2, 3], [0, 4], [2.0, 2], "22", [True, 4], [10**12], [1] * 17])
def test_megatron_hierarchy_multiplies_to_cp(levels: Any) -> None:
    with pytest.raises(LayoutError, match="hierarchical_cp"):
        GroupMap.build("megatron", cp=4, hierarchical_cp=levels)


@pytest.mark.parametrize("engram", [{"cpu": True}, {"cpu_offload": 1}, "on", [], True])
def test_vllm_engram_is_two_flags(engram: Any) -> None:
    with pytest.raises(LayoutError, match="engram"):
        GroupMap.build("vllm", tp=2, engram=engram)


def test_vllm_elastic_engines_stay_inside_a_node() -> None:
    with pytest.raises(LayoutError, match="whole engines in a node"):
        GroupMap.build("vllm", tp=4, nodes=2, moe=True, eplb=True, elastic_ep=True)


def test_vllm_sizes_that_contradict_the_world_are_refused() -> None:
    with pytest.raises(LayoutError, match="allowed: leave world out, or ext_dp"):
        GroupMap.build("vllm", tp=2, ext_dp=2, world=8)


@pytest.mark.parametrize(
    ("system", "asked", "nearest"),
    [
        ("sglang", "dp", "attn_dp"),
        ("sglang", "ep", "moe_ep"),
        ("sglang", "cp", "attn_cp"),
        ("sglang", "tp_size", "tp"),
        ("sglang", "dp_size", "attn_dp"),
        ("sglang", "--ep-size", "moe_ep"),
        ("sglang", "attn_cp_size", "attn_cp"),
        ("sglang", "tensor_parallel_size", "tp"),
        ("vllm", "tensor_parallel_size", "tp"),
        ("vllm", "data_parallel_size", "dp"),
        ("vllm", "pipeline-parallel-size", "pp"),
        ("vllm", "decode_context_parallel_size", "dcp"),
        ("vllm", "ep", "moe"),
        ("vllm", "enable_expert_parallel", "moe"),
        ("vllm", "cp", "pcp"),
        ("megatron", "tensor_model_parallel_size", "tp"),
        ("megatron", "pipeline_model_parallel_size", "pp"),
        ("megatron", "context_parallel_size", "cp"),
        ("megatron", "expert_model_parallel_size", "ep"),
        ("megatron", "dp", "world"),
        ("megatron", "world_size", "world"),
    ],
)
def test_what_the_engines_call_a_size_leads_to_its_name_here(system: str, asked: str, nearest: str) -> None:
    with pytest.raises(LayoutError, match=f"nearest name: '{nearest}'"):
        GroupMap.build(system, **{asked: 8})


def test_a_name_that_is_not_the_same_thing_is_suggested_with_the_difference() -> None:
    with pytest.raises(LayoutError) as refused:
        GroupMap.build("vllm", tp=8, ep=8)
    assert str(refused.value) == (
        "vllm has no size 'ep'; known sizes: tp, pp, pcp, dcp, dp, ext_dp, moe, eplb, nodes, engram, elastic_ep, "
        "world; nearest name: 'moe' (moe=true makes the expert groups, each dp*pcp*tp ranks wide)"
    )


def test_every_suggested_name_exists_and_none_hides_a_real_one() -> None:
    assert set(NAMES) == set(SYSTEMS)
    for system, names in NAMES.items():
        assert set(names.values()) <= set(SYSTEMS[system].specs)
        assert not set(names) & set(SYSTEMS[system].specs)


def test_kinds_too_are_found_by_the_engines_names() -> None:
    group_map = GroupMap.build("sglang", tp=8, moe_ep=4, attn_cp=2)
    for asked, nearest in (("ep", "moe_ep"), ("cp", "attn_cp")):
        with pytest.raises(LayoutError, match=f"nearest name: '{nearest}'"):
            group_map.keys(asked)
