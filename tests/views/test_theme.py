"""Colours: fixed per kind, and readable. Contrast is WCAG's; plotly's choice of black or white letters is restated."""

from __future__ import annotations

from itertools import pairwise

import pytest

from workbench.ranks import GroupMap
from workbench.views import kind_colour
from workbench.views.theme import fade, group_shades, mix

MAPS = (
    GroupMap.build("sglang", tp=8, attn_cp=2, moe_ep=4, pp=2),
    GroupMap.build("vllm", tp=4, dp=2, pp=2),
    GroupMap.build("megatron", tp=2, cp=2, pp=2, ep=2, world=16),
)
KINDS = sorted({kind for m in MAPS for kind in m.groups} | {"default_pg", "my_tp", "x", "y"})


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def plotly_letters(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#ffffff" if (red * 299 + green * 587 + blue * 114) / 1000 < 128 else "#444444"


@pytest.mark.parametrize("kind", KINDS)
def test_letters_can_be_read_on_every_shade(kind: str) -> None:
    shades = group_shades(kind, 99)
    assert len(shades) == len(set(shades)) == 5
    assert min(contrast(s, plotly_letters(s)) for s in shades) > 3.5


@pytest.mark.parametrize("kind", KINDS)
def test_neighbouring_groups_differ_clearly(kind: str) -> None:
    for num_groups in (2, 3, 4, 5):
        shades = group_shades(kind, num_groups)
        pairs = list(pairwise(shades))
        assert min(contrast(a, b) for a, b in pairs) > 1.09


def test_the_families_have_the_colours_of_the_legend() -> None:
    assert {k: kind_colour(k) for k in ("tp", "attn_cp", "dp", "moe_ep", "pp", "world")} == {
        "tp": "#0072B2",
        "attn_cp": "#E69F00",
        "dp": "#007A5A",
        "moe_ep": "#B8482A",
        "pp": "#A8487F",
        "world": "#6B7280",
    }
    assert kind_colour("my_tp") == kind_colour("tp")


@pytest.mark.parametrize(("group_map", "shared"), [(MAPS[0], 1), (MAPS[1], 0), (MAPS[2], 4)])
def test_few_kinds_of_one_map_share_a_colour(group_map: GroupMap, shared: int) -> None:
    colours = {kind_colour(kind) for kind in group_map.groups}
    assert len(group_map.groups) - len(colours) <= shared


def test_mix_and_fade_are_plain_arithmetic() -> None:
    assert mix("#000000", "#FFFFFF", 0.5) == "#808080"
    assert fade("#0072B2", 0.25) == "rgba(0,114,178,0.25)"
