"""What a GroupMap answers: groups by rank, aliases, names, JSON, equality, custom lists, its drawing, its sentences."""

from __future__ import annotations

import copy
import json
import pickle
import re
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest

from tests.ranks.oracle_data import params
from workbench.errors import LayoutError
from workbench.ranks import GroupKey, GroupMap


@pytest.fixture
def golden() -> GroupMap:
    return GroupMap.build("sglang", tp=4, pp=2, attn_cp=2, moe_ep=2)


def test_group_of_names_the_group_in_world_ranks(golden: GroupMap) -> None:
    assert golden.group_of("attn_cp", 6) == GroupKey("attn_cp", (4, 6))
    assert golden.group_of("attn_cp", 6).group_rank(6) == 1


def test_an_alias_gives_the_key_of_its_owner(golden: GroupMap) -> None:
    assert golden.aliases == {"moe_dp": "attn_cp"}
    assert golden.group_of("moe_dp", 6) == golden.group_of("attn_cp", 6)
    assert golden.keys("moe_dp") == golden.keys("attn_cp")
    assert golden.owner("moe_dp") == "attn_cp"
    assert golden.owner("tp") == "tp"


def test_keys_come_in_creation_order(golden: GroupMap) -> None:
    assert [str(key) for key in golden.keys("attn_cp")] == [
        "attn_cp[0,2]",
        "attn_cp[1,3]",
        "attn_cp[4,6]",
        "attn_cp[5,7]",
    ]


def test_kinds_are_owning_kinds_then_aliases(golden: GroupMap) -> None:
    assert golden.kinds == (
        *("world", "tp", "attn_cp", "attention_tp", "moe_ep", "moe_tp", "pp", "self_pp"),
        "moe_dp",
    )


@pytest.mark.parametrize("rank", [-1, 8, 10**12, True, 1.0, "1", None])
def test_a_rank_outside_the_world_is_refused(golden: GroupMap, rank: Any) -> None:
    with pytest.raises(LayoutError, match=r"0\.\.7"):
        golden.group_of("tp", rank)
    with pytest.raises(LayoutError, match=r"0\.\.7"):
        golden.coordinates(rank)


def test_a_rank_outside_the_kind_is_refused_with_the_nearest() -> None:
    group_map = GroupMap.build("megatron", world=8, pp=4)
    with pytest.raises(LayoutError, match=r"rank 5 is in no 'pos_embd' group; .* 2 of 8 ranks, 0\.\.1; nearest: 1"):
        group_map.group_of("pos_embd", 5)


def test_a_wide_rank_is_not_an_engine_local_rank() -> None:
    group_map = GroupMap.build("vllm", tp=2, dp=4, moe=True, eplb=True, elastic_ep=True)
    assert group_map.group_of("tp", 1).world_ranks == (0, 1)
    assert group_map.group_of("dp", 5).world_ranks == (1, 3, 5, 7)
    with pytest.raises(LayoutError, match=r"counts ranks inside one engine: 0\.\.1, not 5; .* rank 1 of engine 2"):
        group_map.group_of("tp", 5)


def test_an_unknown_kind_names_the_known_and_the_nearest(golden: GroupMap) -> None:
    with pytest.raises(LayoutError, match=r"'attention_cp' is not a kind .*known kinds: world, tp.*nearest name: 'att"):
        golden.group_of("attention_cp", 0)
    for method in (golden.keys, golden.origin, golden.owner):
        for kind in ("", "TPX", None, 3, ("tp",), ["tp"]):
            with pytest.raises(LayoutError, match="known kinds"):
                method(kind)  # type: ignore[arg-type]  # the claim


def test_an_absent_kind_is_told_from_an_unknown_one(golden: GroupMap) -> None:
    with pytest.raises(LayoutError, match="sglang has no 'dcp' groups with these sizes"):
        golden.group_of("dcp", 0)


def test_a_map_cannot_be_changed(golden: GroupMap) -> None:
    for mapping in (golden.groups, golden.aliases, golden.sizes):
        with pytest.raises(TypeError):
            mapping["tp"] = ()  # type: ignore[index]  # the claim
    with pytest.raises(AttributeError):
        golden.world_size = 4  # type: ignore[misc]  # the claim


def test_sizes_are_told_in_full(golden: GroupMap) -> None:
    assert golden.sizes == {
        "tp": 4,
        "pp": 2,
        "attn_dp": 1,
        "attn_cp": 2,
        "moe_ep": 2,
        "moe_dp": 1,
        "dcp": 1,
        "shared_experts_tp": None,
        "pdmux": False,
        "world": 8,
    }
    assert GroupMap.build("sglang", **golden.sizes) == golden


def test_a_digest_is_the_same_in_another_process(golden: GroupMap) -> None:
    assert golden.digest == "2b6c6a0df2222046a525c92fc73f891f18dd197cd610a0bafa1bae430477fa82"


def test_digests_tell_sizes_and_groups_apart() -> None:
    maps = [
        GroupMap.build("sglang", tp=4),
        GroupMap.build("sglang", tp=4, moe_ep=2),
        GroupMap.build("sglang", tp=4, pp=2),
        GroupMap.build("sglang", tp=4, pdmux=True),
        GroupMap.build("vllm", tp=4),
        GroupMap.build("megatron", tp=4),
        GroupMap.custom({"tp": [[0, 1, 2, 3]]}),
        GroupMap.custom({"tp": [[0, 2, 1, 3]]}),
        GroupMap.custom({"tp": [[0, 1, 2, 3]]}, world_size=5),
        GroupMap.custom({"ep": [[0, 1, 2, 3]]}),
        GroupMap.custom({"a": [[0, 1]], "b": [[0], [1]]}),
        GroupMap.custom({"b": [[0], [1]], "a": [[0, 1]]}),
    ]
    assert len({group_map.digest for group_map in maps}) == len(set(maps)) == len(maps)


@pytest.mark.parametrize(("system", "case"), params("cases"))
def test_json_and_pickle_give_the_same_map_back(system: str, case: dict[str, Any]) -> None:
    group_map = GroupMap.build(system, launch_checks=False, **case["config"])
    text = json.dumps(group_map.to_json())
    for copied in (
        GroupMap.from_json(json.loads(text)),
        pickle.loads(pickle.dumps(group_map)),
        copy.deepcopy(group_map),
    ):
        assert copied == group_map
        assert hash(copied) == hash(group_map)
        assert copied.groups == group_map.groups
        assert json.dumps(copied.to_json()) == text
        assert list(copied.creation_order()) == list(group_map.creation_order())


def test_json_of_a_custom_map_comes_back() -> None:
    group_map = GroupMap.custom({"tp": [[3, 1], [0, 2]]}, world_size=6)
    assert GroupMap.from_json(json.loads(json.dumps(group_map.to_json()))) == group_map


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"schema": None},
        {"system": "megatron"},
        {"system": "tensorrt"},
        {"system": None},
        {"sizes": None},
        {"sizes": []},
        {"sizes": {"tp": 4, "pp": 2, "attn_cp": 2, "moe_ep": 4}},
        {"sizes": {"tp": "4"}},
        {"sizes": {"tp": 4, "launch_checks": True}},
        {"sizes": {3: 4}},
        {"world_size": 9},
        {"groups": {}},
        {"groups": None},
        {"aliases": {}},
        {"local_numbering": ["tp"]},
        {"digest": "0" * 64},
    ],
)
def test_json_that_was_changed_is_refused(golden: GroupMap, change: dict[str, Any]) -> None:
    with pytest.raises(LayoutError):
        GroupMap.from_json({**golden.to_json(), **change})


def test_json_with_one_swapped_rank_is_refused(golden: GroupMap) -> None:
    document = golden.to_json()
    document["groups"]["tp"][0] = [1, 0, 2, 3]
    with pytest.raises(LayoutError, match="changed, or written for another version"):
        GroupMap.from_json(document)


@pytest.mark.parametrize("document", [None, "{}", [], 3, {}, {"schema": 1}])
def test_json_of_another_shape_is_refused(document: Any) -> None:
    with pytest.raises(LayoutError):
        GroupMap.from_json(document)


def test_custom_keeps_lists_as_given() -> None:
    group_map = GroupMap.custom({"tp": [[2, 0], (1, 3)], "draft": [[1]]})
    assert group_map.groups == {"tp": ((2, 0), (1, 3)), "draft": ((1,),)}
    assert group_map.world_size == 4
    assert group_map.numbering_differs == ("tp",)
    assert group_map.coordinates(3) == {}
    assert group_map.origin("tp") == "lists given by the program"
    with pytest.raises(LayoutError, match="no 'draft' group"):
        group_map.group_of("draft", 0)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({}, "non-empty dict"),
        (None, "non-empty dict"),
        ([[0, 1]], "non-empty dict"),
        ({"tp": []}, "non-empty list of rank lists"),
        ({"tp": "01"}, "non-empty list of rank lists"),
        ({"tp": {0, 1}}, "non-empty list of rank lists"),
        ({"tp": [[]]}, "group 0 of kind 'tp'"),
        ({"tp": [[0], 1]}, "group 1 of kind 'tp' is 1"),
        ({"tp": ["01"]}, "group 0 of kind 'tp'"),
        ({"tp": [[0, -1]]}, "holds world rank -1"),
        ({"tp": [[0, True]]}, "holds world rank True"),
        ({"tp": [[0, 1.0]]}, "holds world rank 1.0"),
        ({"tp": [[0, "1"]]}, "holds world rank '1'"),
        ({"tp": [[0, None]]}, "holds world rank None"),
        ({"tp": [[10**12]]}, "holds world rank 1000000000000"),
        ({"tp": [[10**5000]]}, "holds world rank an integer of"),
        ({"tp": [[0, 0]]}, "rank 0 is in groups 0 and 0"),
        ({"tp": [[0, 1], [2, 1]]}, "rank 1 is in groups 0 and 1 of kind 'tp'"),
        ({"": [[0]]}, "not a plain word"),
        ({"tp:0": [[0]]}, "not a plain word"),
        ({3: [[0]]}, "not a plain word"),
        ({"x" * 65: [[0]]}, "not a plain word"),
    ],
)
def test_custom_refuses_lists_that_are_no_groups(groups: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        GroupMap.custom(groups)


@pytest.mark.parametrize("world_size", [0, -1, 1, True, 2.0, "4", 10**12])
def test_custom_world_holds_every_rank(world_size: Any) -> None:
    with pytest.raises(LayoutError):
        GroupMap.custom({"tp": [[0, 1]]}, world_size=world_size)


def test_a_small_map_is_drawn_as_kinds_by_ranks(golden: GroupMap) -> None:
    assert str(golden).splitlines() == [
        f"sglang tp=4 pp=2 attn_cp=2 moe_ep=2 world=8 digest={golden.digest[:12]}",
        "kind           lists   size  0 1 2 3 4 5 6 7",
        "world              1      8  0 0 0 0 0 0 0 0",
        "tp                 2      4  0 0 0 0 1 1 1 1",
        "attn_cp            4      2  0 1 0 1 2 3 2 3",
        "attention_tp       4      2  0 0 1 1 2 2 3 3",
        "moe_ep             4      2  0 1 0 1 2 3 2 3",
        "moe_tp             4      2  0 0 1 1 2 2 3 3",
        "pp                 4      2  0 1 2 3 0 1 2 3",
        "self_pp            8      1  0 1 2 3 4 5 6 7",
        "moe_dp is attn_cp",
        "A number is the place of the rank's list in creation order; '.': in no list.",
    ]
    assert repr(golden) == f"GroupMap({str(golden).splitlines()[0]})"


def test_a_wide_map_is_drawn_as_abbreviated_lists() -> None:
    lines = str(GroupMap.build("megatron", world=256, tp=8, pp=2)).splitlines()
    assert lines[1:4] == [
        "kind             lists   size  world ranks",
        "dp_cp               16     16  0..120 step 8 | 1..121 step 8 | 2..122 step 8 | ... | 135..255 step 8",
        "dp                  16     16  0..120 step 8 | 1..121 step 8 | 2..122 step 8 | ... | 135..255 step 8",
    ]
    assert "tp                  32      8  0..7 | 8..15 | 16..23 | ... | 248..255" in lines
    assert "intra_dp_cp is dp_cp" in lines


@pytest.mark.parametrize(("system", "case"), params("cases"))
def test_a_drawing_stays_readable_and_ascii(system: str, case: dict[str, Any]) -> None:
    group_map = GroupMap.build(system, launch_checks=False, **case["config"])
    drawing = str(group_map)
    assert drawing.isascii()
    assert drawing == str(GroupMap.from_json(group_map.to_json()))
    assert max(map(len, drawing.splitlines())) <= 200
    assert all(re.search(rf"^{kind}\b", drawing, re.MULTILINE) for kind in group_map.kinds)


def test_unsorted_and_engine_local_lists_are_marked() -> None:
    drawing = str(GroupMap.build("vllm", tp=2, pcp=2, dcp=4, dp=2, moe=True, eplb=True, elastic_ep=True))
    assert "dcp*       1      4  0 0 0 0 . . . ." in drawing.splitlines()
    assert "* has lists that are not ascending: torch numbers their members otherwise." in drawing
    assert "Ranks counted inside one engine: tp, dcp, pcp, pp." in drawing


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("attn_cp", "2 ranks that share pp, attn_tp and differ in attn_cp; stride 2"),
        ("attention_tp", "2 ranks that share pp, attn_cp and differ in attn_tp; stride 1"),
        ("pp", "2 ranks that share tp and differ in pp; stride 4"),
        ("moe_dp", "the very groups of attn_cp: 2 ranks that share pp, attn_tp and differ in attn_cp; stride 2"),
        ("world", "all ranks"),
    ],
)
def test_origin_is_one_sentence(golden: GroupMap, kind: str, sentence: str) -> None:
    assert golden.origin(kind) == sentence


def test_origin_leaves_out_axes_of_size_one() -> None:
    group_map = GroupMap.build("vllm", tp=2, dp=2, moe=True)
    assert group_map.origin("ep") == "4 ranks of the world; they differ in dp, tp; stride 1"
    assert group_map.origin("pp") == "each rank alone: pp is 1 wide"


SHARING = re.compile(r"(\d+) ranks (?:that share (.+) and|of the world; they) differ in ([^;]+); (.+)")
NEIGHBOURS = re.compile(r"(at most )?(\d+) neighbours of one (\w+) list")


@pytest.mark.parametrize(("system", "case"), params("cases"))
def test_origins_are_true(system: str, case: dict[str, Any]) -> None:
    group_map = GroupMap.build(system, launch_checks=False, **case["config"])
    where = [group_map.coordinates(rank) for rank in range(group_map.world_size)]
    checked = 0
    for kind, lists in group_map.groups.items():
        origin = group_map.origin(kind)
        steps = {after - before for ranks in lists for before, after in pairwise(ranks)}
        told = SHARING.search(origin)
        if told:
            shared = told[2].split(", ") if told[2] else []
            moving = told[3].split(", ")
            for ranks in lists:
                assert len(ranks) == int(told[1])
                assert len({tuple(where[rank][axis] for axis in shared) for rank in ranks}) == 1
                assert len({tuple(where[rank][axis] for axis in moving) for rank in ranks}) == len(ranks)
            checked += 1
        if NEIGHBOURS.search(origin):
            at_most, length, source = NEIGHBOURS.search(origin).groups()  # type: ignore[union-attr]  # found above
            sources = [",".join(map(str, ranks)) + "," for ranks in group_map.groups[source]]
            for ranks in lists:
                assert len(ranks) == int(length) or at_most
                assert any(("," + text).find("," + ",".join(map(str, ranks)) + ",") >= 0 for text in sources)
            checked += 1
        if "stride" in origin:
            stride = int(origin.split("stride ")[1].split()[0])
            assert steps == {stride}
        if "uneven steps" in origin:
            assert len(steps) > 1
        if "alone" in origin:
            assert all(len(ranks) == 1 for ranks in lists)
            checked += 1
    assert checked >= 3


def test_ranks_needs_no_torch() -> None:
    code = "import sys, workbench.ranks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
