"""Pins the explorer of layouts: it draws what GroupMap builds, and explains what GroupMap refuses."""

from __future__ import annotations

import pytest

from workbench.errors import LayoutError
from workbench.explorer import LayoutExplorer
from workbench.ranks import GroupMap
from workbench.views import PLOTLY


def slider(explorer: LayoutExplorer, name: str):
    return next(w for w in explorer._sizes.children if w.description == name)


def buttons(explorer: LayoutExplorer) -> list[str]:
    return [b.description for b in explorer._choices.children]


def test_it_starts_with_the_sizes_it_is_given() -> None:
    explorer = LayoutExplorer("sglang", tp=8, attn_cp=2)
    assert explorer.group_map == GroupMap.build("sglang", tp=8, attn_cp=2)
    assert explorer.problem == ""
    assert slider(explorer, "tp").value == 8
    assert len(explorer._map.outputs) == 1


def test_moving_a_slider_draws_the_map_anew() -> None:
    explorer = LayoutExplorer("sglang", tp=4)
    before = explorer._map.outputs
    slider(explorer, "attn_cp").value = 2
    assert explorer.group_map.groups["attn_cp"] == ((0, 2), (1, 3))
    assert explorer._map.outputs != before
    assert "attn_cp=2" in explorer._map.outputs[0]["data"][PLOTLY]["layout"]["title"]["text"]


def test_an_impossible_choice_is_explained_and_the_nearest_legal_one_can_be_taken() -> None:
    explorer = LayoutExplorer("sglang", tp=4)
    slider(explorer, "attn_cp").value = 3
    with pytest.raises(LayoutError) as refused:
        GroupMap.build("sglang", tp=4, attn_cp=3)
    assert explorer.problem == str(refused.value)
    assert "tp=4 cannot be cut into" in explorer._message.value
    assert explorer.group_map == GroupMap.build("sglang", tp=4)  # the last legal one still stands
    assert "attn_cp = 2" in buttons(explorer)
    explorer._choices.children[buttons(explorer).index("attn_cp = 2")].click()
    assert explorer.problem == ""
    assert buttons(explorer) == []
    assert explorer.group_map == GroupMap.build("sglang", tp=4, attn_cp=2)


@pytest.mark.parametrize("system", ["sglang", "vllm", "megatron"])
def test_every_offer_is_legal(system: str) -> None:
    """For each refusal met on a walk over small sizes, each button leads to a map."""
    offered = 0
    for sizes in ({"tp": 6}, {"tp": 4, "pp": 2}, {"tp": 3}):
        explorer = LayoutExplorer(system, **sizes)
        for control in explorer._sizes.children:
            if type(control).__name__ != "IntSlider":
                continue
            old = control.value
            control.value = 5
            for n in range(len(explorer._choices.children)):
                chosen = {c.description: c.value for c in explorer._sizes.children}
                explorer._choices.children[n].click()
                assert explorer.problem == "", (sizes, control.description)
                offered += 1
                explorer.set(**chosen)
            control.value = old
    assert offered > 5


def test_another_system_brings_its_own_sizes() -> None:
    explorer = LayoutExplorer("sglang", tp=4)
    explorer._system.value = "megatron"
    assert explorer.group_map == GroupMap.build("megatron", tp=4)
    assert "optimizer_instances" in [w.description for w in explorer._sizes.children]
    explorer.set(tp=2, pp=2, world=8)
    assert explorer.group_map == GroupMap.build("megatron", tp=2, pp=2, world=8)


def test_sizes_that_no_slider_reaches_can_be_set() -> None:
    explorer = LayoutExplorer("vllm", tp=128)
    assert explorer.group_map.world_size == 128
    explorer.set(dp=16)
    assert explorer.group_map.world_size == 2048
    assert "wider than 1024 ranks" in repr(explorer.shown)
    with pytest.raises(LayoutError, match="vllm has no size 'attn_cp' to set"):
        explorer.set(attn_cp=2)


def test_it_shows_widgets_and_beside_them_the_plain_figure() -> None:
    data = LayoutExplorer("vllm", tp=2)._repr_mimebundle_()
    assert {"application/vnd.jupyter.widget-view+json", PLOTLY, "text/plain"} <= set(data)
    assert data["text/plain"].startswith("vllm tp=2")
