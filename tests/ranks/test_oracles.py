"""Every recorded answer is reproduced: lists, order of lists and kinds, aliases, start-up calls, coordinates, refusals.

All values compared here are the records' own (oracles/README.md); nothing is recomputed from this package.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from tests.ranks.oracle_data import SYSTEMS, load, params
from workbench.errors import LayoutError
from workbench.ranks import SYSTEMS as RULES
from workbench.ranks import GroupMap

RECORDS = {"sglang": (43, 9), "vllm": (40, 8), "megatron": (40, 8)}


def build(system: str, case: dict[str, Any]) -> GroupMap:
    return GroupMap.build(system, launch_checks=False, **case["config"])


@pytest.mark.parametrize("system", SYSTEMS)
def test_no_record_is_left_out_and_the_rules_name_the_version_they_follow(system: str) -> None:
    assert (len(load(system)["cases"]), len(load(system)["invalid"])) == RECORDS[system]
    assert RULES[system].version == load(system)["version"]


@pytest.mark.parametrize(("system", "case"), params("cases"))
def test_groups_aliases_and_absent_kinds_are_those_of_the_system(system: str, case: dict[str, Any]) -> None:
    group_map = build(system, case)
    assert list(group_map.groups) == list(case["groups"])
    for kind, lists in case["groups"].items():
        assert [list(ranks) for ranks in group_map.groups[kind]] == lists, kind
    assert group_map.aliases == case["aliases"]
    assert list(group_map.absent) == case["absent"]
    assert set(group_map.kinds) == {*case["groups"], *case["aliases"]}


@pytest.mark.parametrize(("system", "case"), params("cases"))
def test_every_start_up_call_comes_in_the_order_of_the_system(system: str, case: dict[str, Any]) -> None:
    group_map = build(system, case)
    calls = [[kind, channel, list(ranks)] for kind, channel, ranks in group_map.creation_order()]
    log = json.dumps(calls, separators=(",", ":"))
    assert hashlib.sha256(log.encode()).hexdigest()[:16] == case["call_log_sha256"]
    assert len(calls) == group_map.new_group_calls == case["new_group_calls"]
    assert sorted(group_map.cpu_group_kinds) == case["cpu_group_kinds"]


@pytest.mark.parametrize(("system", "case"), params("cases"))
def test_numberings_are_those_of_the_system(system: str, case: dict[str, Any]) -> None:
    group_map = build(system, case)
    assert list(group_map.local_numbering) == case.get("local_numbering", [])
    if system == "vllm":
        assert list(group_map.numbering_differs) == case["numbering_differs"]


@pytest.mark.parametrize(("system", "case"), params("cases"))
def test_launch_checks_agree_with_the_system(system: str, case: dict[str, Any]) -> None:
    passes = case.get("passes_launch_checks", True)
    assert (build(system, case).launch_problem is None) == passes
    if passes:
        assert GroupMap.build(system, **case["config"]) == build(system, case)
    else:
        with pytest.raises(LayoutError, match="by the launch checks"):
            GroupMap.build(system, **case["config"])


@pytest.mark.parametrize(("system", "record"), params("invalid"))
def test_what_the_system_refuses_is_refused(system: str, record: dict[str, Any]) -> None:
    with pytest.raises(LayoutError, match=r"nearest legal choice: \w+="):
        GroupMap.build(system, **record["config"])
    if record["stage"] == "launch":
        assert record["group_builder_accepts"]
        assert GroupMap.build(system, launch_checks=False, **record["config"]).launch_problem is not None
    else:
        with pytest.raises(LayoutError, match=r"nearest legal choice: \w+="):
            GroupMap.build(system, launch_checks=False, **record["config"])


def test_coordinates_are_those_sglang_publishes() -> None:
    """But for moe_dp where it is the attention-CP group: SGLang then publishes the place in that group."""
    checked = 0
    for case in load("sglang")["cases"]:
        group_map = build("sglang", case)
        for name, published in case.get("coords", {}).items():
            axis = name.removesuffix("_rank")
            kind = {"attn_tp": "attention_tp"}.get(axis, axis)
            for rank, place in enumerate(published):
                if axis != "attn_dp":
                    assert group_map.group_of(kind, rank).group_rank(rank) == place, name
                if axis != "moe_dp" or group_map.aliases.get("moe_dp") is None:
                    assert group_map.coordinates(rank)[axis] == place, name
                checked += 1
    assert checked > 2000


def test_derived_widths_are_those_of_the_systems() -> None:
    for case in load("sglang")["cases"]:
        widths = build("sglang", case).widths
        assert widths["attn_tp"] == case["derived"]["attn_tp_size"]
        assert widths["moe_tp"] == case["derived"]["moe_tp_size"]
    for case in load("megatron")["cases"]:
        widths = build("megatron", case).widths
        assert {name: widths[name] for name in ("dp", "edp")} == case["derived"]
