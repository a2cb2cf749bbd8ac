"""The group map's picture: what each cell says, how big it gets, and that it is the same on every run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from workbench.ranks import GroupMap
from workbench.views import group_map_caption, group_map_figure, group_map_report, group_map_text

SGLANG = GroupMap.build("sglang", tp=4, attn_cp=2)


def drawn(group_map: GroupMap) -> dict[str, Any]:
    return json.loads(group_map_figure(group_map).to_json())


def rows(group_map: GroupMap) -> dict[str, dict[str, Any]]:
    return {trace["name"]: trace for trace in drawn(group_map)["data"]}


def test_a_row_is_a_kind_and_a_cell_carries_the_number_of_its_group() -> None:
    found = rows(SGLANG)
    assert list(found) == ["world", "tp", "attn_cp", "attention_tp", "moe_ep", "pp", "self_pp", "moe_dp", "moe_tp"]
    assert found["attn_cp"]["text"] == [["0", "1", "0", "1"]]
    assert found["attention_tp"]["text"] == [["0", "0", "1", "1"]]
    assert found["pp"]["text"] == [["0", "1", "2", "3"]]


def test_aliases_are_thin_rows_named_after_their_owner() -> None:
    figure = drawn(SGLANG)
    assert figure["layout"]["yaxis"]["ticktext"][-2:] == ["moe_dp = attn_cp", "moe_tp = tp"]
    alias = rows(SGLANG)["moe_dp"]
    assert (alias["dy"], "text" in alias) == (0.5, False)
    assert alias["colorscale"] == rows(SGLANG)["attn_cp"]["colorscale"]
    assert "the very groups of attn_cp" in alias["hovertemplate"]


def test_hovering_tells_members_both_numberings_and_origin() -> None:
    row = rows(GroupMap.custom({"tp": [[0, 2, 1, 3], [4, 5]], "ep": [[1, 5]]}))["tp"]
    assert row["customdata"][0][2] == "group 0: ranks 0,2,1,3<br>group rank 1 of 0..3, torch rank 2"
    assert row["customdata"][0][4] == "group 1: ranks 4,5<br>group rank 0 of 0..1"
    assert row["hovertemplate"].startswith("<b>world rank %{x}</b>, tp *<br>%{customdata}")
    assert "<i>lists given by the program</i>" in row["hovertemplate"]


def test_a_rank_outside_a_kind_has_an_empty_cell() -> None:
    row = rows(GroupMap.custom({"tp": [[0, 1, 2, 3]], "ep": [[1, 3]]}))["ep"]
    assert row["text"] == [["", "0", "", "0"]]
    assert row["customdata"][0][0] == "in no group of this kind"
    assert row["colorscale"][0][1] == "rgba(0,0,0,0)"


def test_lists_that_are_not_ascending_are_starred_and_explained() -> None:
    figure = drawn(GroupMap.custom({"tp": [[0, 2, 1, 3]]}))
    assert figure["layout"]["yaxis"]["ticktext"] == ["tp *"]
    assert "torch numbers their members otherwise" in figure["layout"]["title"]["subtitle"]["text"]


def test_ranks_inside_one_engine_are_called_so() -> None:
    elastic = GroupMap.build("vllm", tp=2, dp=2, eplb=True, elastic_ep=True, launch_checks=False)
    assert elastic.local_numbering
    row = rows(elastic)[elastic.local_numbering[0]]
    assert row["hovertemplate"].startswith("<b>engine-local rank %{x}</b>")
    assert "ranks counted inside one engine" in drawn(elastic)["layout"]["title"]["subtitle"]["text"]


@pytest.mark.parametrize("world", [64, 256, 1024])
def test_wide_maps_stay_below_300_kb(world: int) -> None:
    wide = GroupMap.build("megatron", tp=8, cp=2, pp=4, ep=2, world=world)
    assert len(group_map_figure(wide).to_json()) < 300_000
    assert drawn(wide)["layout"]["xaxis"]["dtick"] == {64: 2, 256: 8, 1024: 32}[world]


def test_a_wide_map_still_tells_group_and_group_rank_when_hovered() -> None:
    row = rows(GroupMap.build("megatron", tp=8, pp=8, world=1024))["tp"]
    assert row["customdata"]["shape"] == "1, 1024, 2"
    assert "group %{customdata[0]} of 8 ranks<br>group rank %{customdata[1]}" in row["hovertemplate"]


def test_equal_maps_give_equal_figures() -> None:
    again = GroupMap.build("sglang", tp=4, attn_cp=2)
    assert group_map_figure(SGLANG).to_json() == group_map_figure(again).to_json()


def test_the_text_twin_is_the_map_and_its_origins() -> None:
    text = group_map_text(SGLANG)
    assert text.startswith(str(SGLANG))
    assert "attn_cp       2 ranks that share attn_tp and differ in attn_cp; stride 2" in text.splitlines()


def test_the_report_page_lists_kinds_and_groups() -> None:
    page = group_map_report(SGLANG)
    assert "<td>attn_cp</td><td class=number>2</td><td>2</td>" in page
    assert "<td>attn_cp</td><td class=number>1</td><td>1,3</td>" in page
    assert "alias of attn_cp" in page


def test_the_report_page_repeats_what_launch_checks_say() -> None:
    refused = GroupMap.build("sglang", launch_checks=False, tp=8, moe_dp=2)
    assert "launch checks refuse these sizes: moe_dp=2 with attn_cp=1" in group_map_report(refused)


def test_the_caption_asks_for_colour_and_number_since_colours_repeat() -> None:
    six = GroupMap.build("sglang", tp=12, attn_cp=6)
    shades = rows(six)["attention_tp"]
    assert shades["text"][0][::2] == ["0", "1", "2", "3", "4", "5"]
    assert len(shades["colorscale"]) == 12  # two edges each of five shades and of none: the sixth group has the first's
    assert "the same colour and number in a row" in group_map_caption(six)
    assert "number (hover to see it)" in group_map_caption(GroupMap.build("sglang", tp=128))
