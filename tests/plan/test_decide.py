"""Pins which path a group takes: over every combination of host, clique, allocator, architecture, width and switch.

Pinned exactly: which paths exist where, their order, the reasons' ranks, and that no policy stands before the
capability check. A default only: the sizes at which algorithms change, which are the shipped tables'.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.fabric.made import FAILS, blind, fabric_of, make_fabric, make_facts, with_one
from workbench.errors import ArgumentError
from workbench.fabric import NO_CLIQUE, Allocator, Fabric, Facts, simulated
from workbench.plan import (
    BUILT_KERNELS,
    Ask,
    Plan,
    Standing,
    decide_path,
    decide_plans,
    path_order,
    shipped_tables,
)
from workbench.ranks import GroupKey
from workbench.settings import Settings

SMALL = Ask(hidden=4096, tokens=1)  # 8 KiB a rank
UNFUSED = Settings(fusion=False)
ENDS = "its memory is shared within a host only"
ROUNDS_TWICE = "rounds twice between sum and residual, rounding='once' is asked for"
UP_TO_8 = {2, 3, 4, 5, 6, 7, 8}
# architecture -> widths with a custom path, where links allow one at all
WIDTHS: dict[str, set[int]] = {"sm80": set(), "sm90": UP_TO_8, "sm100": UP_TO_8 | {16}, "sm103": UP_TO_8 | {16}}
# (custom all-reduce on, fusion on, rounding) -> the choice where the custom path exists, and where only links exist.
CHOICES = {
    (True, True, "once"): ("custom.fused.push", "library"),
    (True, True, "twice"): ("custom.fused.push", "library"),
    (True, False, "once"): ("library", "library"),
    (True, False, "twice"): ("custom.push", "library"),
    (False, True, "once"): ("library", "library"),
    (False, True, "twice"): ("library", "library"),
    (False, False, "once"): ("library", "library"),
    (False, False, "twice"): ("library", "library"),
}


def _offered(choice: str, *, one_host: bool, size: int, symmetric: bool) -> str:
    """What a choice of CHOICES comes to: libraries' kernels end at the host and at widths of their own."""
    if choice.startswith("custom"):
        return choice
    return "symm_mem" if one_host and symmetric and size <= 8 else "nccl"


def test_the_choice_for_every_combination() -> None:
    """The allocator never matters; the clique matters across hosts only; a width is a matter of the table only."""
    checked: dict[str, int] = {}
    for arch, widths in WIDTHS.items():
        for size in range(2, 17):
            for one_host in (True, False):
                for clique in (True, False):
                    for allocator in (Allocator.PLAIN, Allocator.VMM_POSIX_FD, Allocator.VMM_FABRIC):
                        fabric = make_fabric(
                            size, num_hosts=1 if one_host else 2, clique=clique, allocator=allocator, arch=arch
                        )
                        for (custom, fusion, rounding), (own, linked) in CHOICES.items():
                            for symmetric in (True, False):
                                wanted = "nccl"
                                if one_host or clique:
                                    choice = own if size in widths else linked
                                    wanted = _offered(choice, one_host=one_host, size=size, symmetric=symmetric)
                                settings = Settings(custom_all_reduce=custom, fusion=fusion)
                                ask = replace(SMALL, rounding=rounding, symmetric_memory=symmetric)
                                plan = decide_path(fabric, ask, settings)
                                assert plan.choice == wanted, (arch, size, one_host, clique, allocator, plan)
                                checked[plan.choice] = checked.get(plan.choice, 0) + 1
    assert checked == {
        "custom.fused.push": 828,  # 207 groups with links and a width, two switches' states with it, two offers
        "custom.push": 414,
        "symm_mem": 966,
        "nccl": 9312,
    }
    assert sum(checked.values()) == 4 * 15 * 2 * 2 * 3 * 8 * 2


def test_plans_in_full() -> None:
    trays = simulated("gb200-4x4")
    tp16 = Fabric(GroupKey("tp", tuple(range(16))), tuple(trays.facts_of(r) for r in range(16)))
    group = "tp[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15]"
    assert decide_path(tp16, Ask(hidden=7168, tokens=1)) == Plan(
        group=group,
        choice="custom.fused.push",
        reason="14 KiB a rank is in row 1 of sm100/ws16 fused, 152 blocks; on 4 hosts in one NVLink clique "
        "(gb200-4x4-fabric clique 0)",
        fallback=f"nccl over {group} above 16 MiB",
        capacity_tokens=1,
        workspace_bytes=430144,  # 2 halves x 15 peers x 14336, and 64 of control words
        standing=Standing.DEFAULT,
    )
    pair = make_fabric(2, multicast=True)
    assert decide_path(pair, Ask(hidden=7168, tokens=8192)) == Plan(
        group="tp[0,1]",
        choice="nccl",
        reason="takes any size over any links",
        rejected=(
            ("custom.fused", "112 MiB is above the 56 MiB at which sm90/ws2 fused ends"),
            ("custom", "112 MiB is above the 56 MiB at which sm90/ws2 graph ends"),
        ),
        capacity_tokens=8192,
    )


@pytest.mark.parametrize(
    ("tokens", "choice", "standing"),
    [(1, "custom.fused.push", "measured"), (4096, "custom.fused.push", "measured"), (4097, "nccl", "default")],
)
def test_two_hopper_gpus_are_served_to_where_the_kernel_was_measured(tokens: int, choice: str, standing: str) -> None:
    """benchmarks/2026-11-29-h200x2: 4,096 tokens of 7168 are 56 MiB. Other widths stay defaults, and end at 16 MiB."""
    plan = decide_path(make_fabric(2), Ask(hidden=7168, tokens=tokens))
    assert (plan.choice, plan.standing.value) == (choice, standing)
    assert decide_path(make_fabric(4), Ask(hidden=7168, tokens=1)).standing is Standing.DEFAULT
    assert decide_path(make_fabric(4), Ask(hidden=7168, tokens=4096)).choice == "nccl"


@pytest.mark.parametrize(
    ("machine", "missing"),
    [
        ("ib-2x8", ["table sm90 has no width 16 (sixteen ranks were never tuned on Hopper", "in no NVLink clique"]),
        (
            "gb200-4x4-two-cliques",
            ["in 2 NVLink cliques (world ranks 0..7: gb200-4x4-two-cliques-fabric clique 0; world ranks 8..15:"],
        ),
    ],
)
def test_sixteen_ranks_are_told_all_that_is_missing(machine: str, missing: list[str]) -> None:
    place = simulated(machine)
    fabric = Fabric(GroupKey("tp", tuple(range(16))), tuple(place.facts_of(r) for r in range(16)))
    plan = decide_path(fabric, SMALL)
    assert plan.choice == "nccl"
    for text in missing:
        assert text in dict(plan.rejected)["custom"]


def test_no_policy_stands_before_the_capability_check() -> None:
    """With a table that has every width, every width runs on one clique: code knows none (sgl-project/sglang#32541)."""
    shipped = shipped_tables()["sm100"]
    table = replace(shipped, entries=dict.fromkeys(range(2, 17), shipped.entries[16]), absent={})
    for size in range(2, 17):
        for num_hosts in (1, 2, size):
            fabric = make_fabric(size, num_hosts=num_hosts, clique=True, arch="sm100")
            assert decide_path(fabric, SMALL, tables={"sm100": table}).choice == "custom.fused.push", (size, num_hosts)


@pytest.mark.parametrize("tokens", [1, 200])
def test_a_group_on_one_host_is_decided_without_reading_clique_or_allocator(tokens: int) -> None:
    """For 200 tokens a multicast row is looked at too."""
    for size in (2, 8, 16):
        for multicast in (True, False):
            fabric = make_fabric(size, arch="sm100", multicast=multicast)
            for settings in (Settings(), Settings(fusion=False), Settings(custom_all_reduce=False)):
                ask = Ask(hidden=7168, tokens=tokens, symmetric_memory=True)
                assert decide_path(blind(fabric), ask, settings) == decide_path(fabric, ask, settings)


DIFFERENCES: list[tuple[dict[str, Any], str, str]] = [
    ({"arch": "sm100"}, "nccl", "mixed architectures (world ranks 0..4, 6, 7: sm90; world rank 5: sm100)"),
    ({"device": ""}, "none", "world rank 5 without a GPU"),
    ({"device": "GPU-2"}, "none", "world ranks 2, 5 share device GPU-2"),
    ({"host": "boot-9", "node": "stray"}, "nccl", "on 2 hosts (world ranks 0..4, 6, 7: node0; world rank 5: stray)"),
    ({"links": ()}, "nccl", "world ranks 0, 5 of node0 are not connected by NVLink"),
    ({"clique": NO_CLIQUE}, "custom.fused.push", ""),
    ({"allocator": Allocator.VMM_FABRIC}, "custom.fused.push", ""),
    ({"multicast_supported": False}, "custom.fused.push", ""),
]


@pytest.mark.parametrize(("fields", "choice", "reason"), DIFFERENCES, ids=[next(iter(d[0])) for d in DIFFERENCES])
def test_one_member_that_differs_decides_for_all_and_is_named(fields: dict[str, Any], choice: str, reason: str) -> None:
    fabric = make_fabric(8)
    if "links" in fields:  # nobody sees the card, and the card sees nobody
        facts = [replace(f, links=tuple(k for k in f.links if k.device != "GPU-5")) for f in fabric.facts]
        fabric = fabric_of(tuple(facts))
    plan = decide_path(with_one(fabric, 5, **fields), SMALL)
    assert plan.choice == choice
    assert reason in str(plan)
    assert ("world rank" in " ".join(r for _, r in plan.rejected)) == bool(reason)


def test_a_member_across_hosts_that_cannot_share_fabric_memory_is_named() -> None:
    fabric = with_one(make_fabric(8, num_hosts=2, clique=True, arch="sm100"), 5, vmm_fabric=FAILS)
    plan = decide_path(fabric, SMALL)
    assert plan.choice == "nccl"
    assert "world rank 5: sharing memory by a fabric handle fails (read back other words)" in str(plan)


def test_switches_are_told_as_reasons() -> None:
    fabric = make_fabric(8)
    assert decide_path(fabric, SMALL, Settings(custom_all_reduce=False)).rejected == (
        ("custom.fused", "switched off by WORKBENCH_CUSTOM_ALL_REDUCE=0"),
        ("custom", "switched off by WORKBENCH_CUSTOM_ALL_REDUCE=0"),
    )
    plan = decide_path(fabric, replace(SMALL, rounding="twice"), Settings(fusion=False))
    assert (plan.choice, plan.rejected) == (
        "custom.push",
        (("custom.fused", "switched off by WORKBENCH_FUSION=0"),),
    )
    assert decide_path(fabric, replace(SMALL, fused=False)).rejected == ()


# tokens of hidden 4096 in bf16 (8 KiB each) on eight Hopper GPUs: where the answer changes
EDGES = [
    (0, "custom.fused.push"),
    (7, "custom.fused.push"),  # 56 KiB; 62,228 bytes are where a second meeting costs less than n - 1 messages
    (8, "custom.fused.two_shot_push"),
    (2048, "custom.fused.two_shot_push"),  # 16 MiB
    (2049, "nccl"),
]


@pytest.mark.parametrize(("tokens", "choice"), EDGES)
def test_larger_messages_are_served_in_two_shots_and_then_fall_through(tokens: int, choice: str) -> None:
    fabric = make_fabric(8)
    for rounding in ("once", "twice"):
        ask = Ask(hidden=4096, tokens=tokens, rounding=rounding)
        assert decide_path(fabric, ask).choice == decide_path(fabric, ask, kernels=BUILT_KERNELS).choice == choice


@pytest.mark.parametrize(("rounding", "choice"), [("once", "nccl"), ("twice", "custom.two_shot_pull")])
def test_without_the_fused_kernel_a_path_that_rounds_otherwise_is_not_taken(rounding: str, choice: str) -> None:
    ask = Ask(hidden=4096, tokens=17, rounding=rounding)
    assert decide_path(make_fabric(8), ask, Settings(fusion=False)).choice == choice


def test_one_ask_up_to_many_tokens_has_a_plan_for_each_range_of_sizes() -> None:
    """Each serves more tokens than the one before; at every size it says what the size alone would get."""
    fabric = make_fabric(8)
    ask = Ask(hidden=4096, tokens=4096, rounding="twice")
    for fusion, choices in {
        True: [("custom.fused.push", 7), ("custom.fused.two_shot_push", 2048), ("nccl", 4096)],
        False: [("custom.push", 16), ("custom.two_shot_pull", 2048), ("nccl", 4096)],
    }.items():
        plans = decide_plans(fabric, ask, Settings(fusion=fusion))
        assert [(plan.choice, plan.capacity_tokens) for plan in plans] == choices
        for tokens in range(1, 4097, 5):
            serving = next(plan for plan in plans if tokens <= plan.capacity_tokens)
            assert serving.choice == decide_path(fabric, replace(ask, tokens=tokens), Settings(fusion=fusion)).choice
    assert [p.choice for p in decide_plans(fabric, replace(ask, tokens=7))] == ["custom.fused.push"]
    assert [p.capacity_tokens for p in decide_plans(fabric, replace(ask, tokens=0))] == [0]


def test_a_row_in_the_middle_of_another_is_a_range_of_its_own() -> None:
    """Four Blackwell ranks, all-reduce alone: shares are pushed from 1.125 MiB to 8 MiB, tried before plain push."""
    plans = decide_plans(make_fabric(4, arch="sm100"), Ask(hidden=4096, tokens=2048, fused=False))
    assert [(p.choice, p.capacity_tokens) for p in plans] == [
        ("custom.push", 143),
        ("custom.two_shot_push", 1024),
        ("custom.two_shot_pull", 2048),
    ]


def test_an_algorithm_without_a_kernel_is_rejected_as_such_after_the_capability() -> None:
    fabric, group = make_fabric(8), "tp[0,1,2,3,4,5,6,7]"
    ask = Ask(hidden=4096, tokens=17, rounding="twice")  # 136 KiB: only two_shot_pull serves it
    plan = decide_path(fabric, ask, UNFUSED, kernels=BUILT_KERNELS)
    assert plan.choice == "nccl"
    assert dict(plan.rejected)["custom"] == "no kernel for two_shot_pull in this build"
    assert decide_path(fabric, replace(ask, tokens=1), UNFUSED, kernels=BUILT_KERNELS).fallback == (
        f"nccl over {group} above 128 KiB"
    )
    unlinked = make_fabric(8, num_hosts=2)
    assert "no kernel" not in str(decide_path(unlinked, ask, UNFUSED, kernels=BUILT_KERNELS))


def test_a_path_asked_for_by_name_ignores_the_sizes_of_tables_and_nothing_else() -> None:
    fabric, ask = make_fabric(8), Ask(hidden=4096, tokens=4096)
    order = path_order("cuda", backend="custom")
    assert order == ("custom.fused", "custom")
    named = decide_plans(fabric, ask, order=order, kernels=BUILT_KERNELS, by_name=True)
    assert [(p.choice, p.capacity_tokens) for p in named] == [
        ("custom.fused.push", 7),
        ("custom.fused.two_shot_push", 4096),
    ]
    assert "is in no row of sm90/ws8 fused with a kernel, but the path was asked for by name" in named[1].reason
    unlinked = make_fabric(8, num_hosts=2)
    for refusing in (unlinked, make_fabric(9), make_fabric(8, arch="sm80")):
        assert decide_path(refusing, ask, order=order, by_name=True).choice == "none"
    off = decide_path(fabric, ask, Settings(custom_all_reduce=False), order=order, by_name=True)
    assert off.choice == "none"


@pytest.mark.parametrize(
    ("size", "num_hosts", "rounding", "dtype", "choice", "reason"),
    [
        (8, 1, "twice", "bfloat16", "flashinfer", ""),
        (8, 1, "once", "float32", "flashinfer", ""),  # an fp32 sum has nothing to round
        (8, 1, "once", "bfloat16", "none", "rounds twice between sum and residual"),
        (3, 1, "twice", "bfloat16", "none", "serves groups of 2, 4, 8, 16 ranks"),
        (8, 2, "twice", "bfloat16", "none", "its memory is shared within a host only"),
    ],
)
def test_flashinfer_is_taken_by_name_where_it_serves(
    size: int, num_hosts: int, rounding: str, dtype: str, choice: str, reason: str
) -> None:
    fabric, order = make_fabric(size, num_hosts=num_hosts, clique=True), path_order("cuda", backend="flashinfer")
    ask = Ask(hidden=4096, tokens=64, rounding=rounding, dtype=dtype)
    plan = decide_path(fabric, ask, order=order, by_name=True)
    assert plan.choice == choice
    assert reason in dict(plan.rejected).get("flashinfer", "")


def test_mnnvl_needs_the_setting_and_the_capability() -> None:
    order = path_order("cuda", backend="flashinfer_mnnvl")
    ask = Ask(hidden=4096, tokens=64, rounding="twice")
    on, off = make_fabric(8, multicast=True), replace_all(make_fabric(8, multicast=True), multicast_supported=False)
    assert decide_path(on, ask, Settings(multicast=True), order=order, by_name=True).choice == "flashinfer_mnnvl"
    told = [
        decide_path(f, ask, s, order=order, by_name=True)
        for f, s in ((on, Settings()), (off, Settings(multicast=True)))
    ]
    assert [plan.rejected for plan in told] == [
        (("flashinfer_mnnvl", "needs multicast; WORKBENCH_MULTICAST=1 allows it"),),
        (("flashinfer_mnnvl", "world ranks 0..7 without multicast in the device"),),
    ]
    without = decide_path(off, ask, Settings(), order=order, by_name=True)  # the setting would not help: no such advice
    assert without.rejected == (("flashinfer_mnnvl", "world ranks 0..7 without multicast in the device"),)


def replace_all(fabric: Fabric, **fields: Any) -> Fabric:
    return fabric_of(tuple(replace(f, **fields) for f in fabric.facts))


def test_what_members_found_unusable_is_passed_over_with_their_reason() -> None:
    fabric = make_fabric(8)
    refused = {"custom.fused.push": "world rank 3: no compiler"}
    plan = decide_path(fabric, SMALL, refused=refused)
    assert plan.choice == "nccl"
    assert dict(plan.rejected)["custom.fused"] == "world rank 3: no compiler"
    plan = decide_path(fabric, SMALL, refused={**refused, "nccl": "world rank 5: no NCCL"})
    assert (plan.choice, dict(plan.rejected)["nccl"]) == ("none", "world rank 5: no NCCL")


def test_an_input_that_custom_accepts_never_takes_symmetric_memory() -> None:
    """And one that it refuses does, if offered. The order is data: the old order gives the old answer."""
    fabric = make_fabric(8)
    checked = 0
    for tokens in range(0, 4096, 37):
        ask = Ask(hidden=4096, tokens=tokens, fused=False, symmetric_memory=True)
        choice = decide_path(fabric, ask).choice
        assert choice.startswith("custom") if tokens <= 2048 else choice == "symm_mem", tokens
        assert decide_path(fabric, ask, order=("symm_mem", "custom.fused", "custom", "nccl")).choice == "symm_mem"
        checked += 1
    assert checked == 111


def test_fallbacks_name_the_path_the_group_and_the_size() -> None:
    fabric = make_fabric(8)
    group = "tp[0,1,2,3,4,5,6,7]"
    assert decide_path(fabric, SMALL).fallback == f"nccl over {group} above 16 MiB"
    assert decide_path(fabric, replace(SMALL, fused=False)).fallback == f"nccl over {group} above 16 MiB"
    offered = replace(SMALL, fused=False, symmetric_memory=True)
    assert decide_path(fabric, offered).fallback == f"symm_mem over {group} above 16 MiB"


def test_multicast_rows_need_the_capability_and_say_so() -> None:
    ask = Ask(hidden=4096, tokens=100, fused=False)  # 800 KiB: multicast stands before two-shot in the table
    on, off = make_fabric(8, multicast=True), replace_all(make_fabric(8, multicast=True), multicast_forbidden=True)
    assert decide_path(on, ask).choice == "custom.multicast"
    plan = decide_path(off, ask)
    assert plan.choice == "custom.two_shot_pull"
    assert dict(plan.rejected)["custom.multicast"] == (
        "world ranks 0..7: multicast is off; WORKBENCH_MULTICAST=1 allows it"
    )


def test_captured_and_eager_calls_read_their_own_rows() -> None:
    fabric = make_fabric(4)
    ask = Ask(hidden=4096, tokens=80, fused=False)  # 640 KiB
    assert decide_path(fabric, ask).choice == "custom.two_shot_pull"
    assert decide_path(fabric, replace(ask, captured=False)).choice == "custom.push"


@pytest.mark.parametrize(
    ("size", "tokens", "fused", "bytes_"),
    [
        (2, 1, True, 2 * 1 * 8192 + 64),
        (8, 7, True, 2 * 7 * 57344 + 64),
        (8, 16, True, 2 * 7 * 61440 + 4 * 131072 + 64),  # pushed up to 60 KiB, in shares above
        (8, 16, False, 2 * 7 * 131072),
        (8, 17, False, 2 * 7 * 131072 + 17 * 8192 + 128 * 64),  # pushed up to 128 KiB, pulled above
        (8, 2049, False, 0),  # nccl's own affair
    ],
)
def test_workspace_bytes_are_those_of_the_staging(size: int, tokens: int, fused: bool, bytes_: int) -> None:
    plan = decide_path(make_fabric(size), Ask(hidden=4096, tokens=tokens, fused=fused))
    assert plan.workspace_bytes == bytes_


def test_workspace_bytes_where_shares_are_pushed_between_the_two() -> None:
    """Four Blackwell ranks: pushed to 1.125 MiB, in shares to 8 MiB, pulled above."""
    fabric = make_fabric(4, arch="sm100")
    found = {n: decide_path(fabric, Ask(hidden=4096, tokens=n, fused=False)) for n in (192, 1025)}
    assert {n: (plan.choice, plan.workspace_bytes) for n, plan in found.items()} == {
        192: ("custom.two_shot_push", 2 * 3 * 1179648 + 4 * 192 * 8192),
        1025: ("custom.two_shot_pull", 2 * 3 * 1179648 + 4 * 8388608 + 1025 * 8192 + 128 * 64),
    }


def test_groups_of_one_rank_and_groups_of_cpu_ranks() -> None:
    assert decide_path(make_fabric(1), SMALL).choice == "alone"
    facts = tuple(Facts(world_rank=r, host="boot-0", node="node0") for r in range(4))
    assert decide_path(fabric_of(facts), SMALL).choice == "shm"
    assert decide_path(fabric_of(facts), SMALL, Settings(fusion=False)).rejected == (
        ("shm", "switched off by WORKBENCH_FUSION=0"),
    )
    apart = fabric_of((*facts[:3], replace(facts[3], host="boot-1", node="node1")))
    plan = decide_path(apart, SMALL)
    assert (plan.choice, plan.rejected) == (
        "gloo",
        (("shm", f"on 2 hosts (world ranks 0..2: node0; world rank 3: node1); {ENDS}"),),
    )


def test_a_group_that_nothing_can_serve_is_unsupported_with_every_reason() -> None:
    facts = make_facts(2)
    plan = decide_path(fabric_of((facts[0], replace(facts[1], device="", arch=""))), SMALL)
    assert (plan.choice, plan.standing, plan.capacity_tokens) == ("none", Standing.UNSUPPORTED, 0)
    assert [name for name, _ in plan.rejected] == ["custom.fused", "custom", "nccl"]


def test_a_measured_table_makes_the_choice_measured() -> None:
    table = replace(shipped_tables()["sm90"], standing=Standing.MEASURED)
    assert decide_path(make_fabric(8), SMALL, tables={"sm90": table}).standing is Standing.MEASURED


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"hidden": 0}, "hidden=0"),
        ({"hidden": True}, "hidden=True"),
        ({"tokens": -1}, "tokens=-1"),
        ({"tokens": 1 << 25}, "allowed: whole numbers from 0 to 16777216"),
        ({"dtype": "int8"}, "dtype='int8'; allowed: bfloat16, float16, float32"),
        ({"rounding": "never"}, "rounding='never'; allowed: once, twice"),
    ],
)
def test_an_ask_out_of_bounds_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        Ask(**{"hidden": 4096, "tokens": 1, **fields})
    assert told in str(refused.value)


def test_rows_that_are_no_whole_vectors_stay_with_the_library() -> None:
    plan = decide_path(make_fabric(8), Ask(hidden=4100, tokens=1))
    assert plan.choice == "nccl"
    assert dict(plan.rejected)["custom"] == "rows of 8200 bytes; allowed: multiples of 16"
