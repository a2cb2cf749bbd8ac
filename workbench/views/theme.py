"""Colours and measures of every figure: one hue a kind, the same everywhere, told apart without red against green.

Hues: after Okabe and Ito's palette for colour-blind readers. Ink and grid are greys that can be read on white and on
black, so that one figure serves light and dark pages; the report sharpens them to the page's own ink.
"""

from __future__ import annotations

from typing import Any

INK = "#757575"
GRID = "rgba(128,128,128,0.28)"
FAINT = "rgba(128,128,128,0.14)"
ALARM = "#D55E00"
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"

_HUES = {
    "world": "#8A8F98",
    "tp": "#0072B2",
    "cp": "#E69F00",
    "dp": "#009E73",
    "ep": "#B8482A",
    "pp": "#CC79A7",
    "other": "#7A6FBF",
}

# Kind -> family and how much lighter (above 0) or darker than the family's hue. A kind that is not here is read by its
# words: "my_tp" belongs to tp.
_KINDS = {
    "attention_tp": ("tp", 0.30),
    "moe_tp": ("tp", -0.30),
    "etp": ("tp", -0.30),
    "tp_ep": ("tp", 0.45),
    "ep_tp": ("tp", -0.15),
    "tp_cp": ("tp", 0.15),
    "attn_cp": ("cp", 0.0),
    "dcp": ("cp", 0.30),
    "pcp": ("cp", -0.25),
    "moe_dp": ("dp", -0.25),
    "edp": ("dp", -0.25),
    "ep_dp": ("dp", -0.25),
    "dp_cp": ("dp", 0.25),
    "moe_ep": ("ep", 0.0),
    "eplb": ("ep", 0.30),
    "self_pp": ("pp", 0.30),
    "embd": ("pp", -0.25),
    "pos_embd": ("pp", -0.35),
    "mp": ("other", 0.0),
    "tp_dp_cp": ("other", 0.20),
    "tp_dp": ("other", -0.20),
    "tp_ep_pp": ("other", 0.35),
    "default_pg": ("world", 0.0),
}


def kind_colour(kind: str) -> str:
    """The colour of a kind as "#rrggbb"; the same in every figure."""
    family, shift = _KINDS.get(kind, (_family(kind), 0.0))
    return mix(_HUES[family], "#FFFFFF" if shift > 0 else "#000000", abs(shift))


def group_shades(kind: str, num_groups: int) -> tuple[str, ...]:
    """Shades of the kind's colour for its groups, at most six, ordered so that neighbours differ clearly.

    Group n has shade n % len(shades).
    """
    base = kind_colour(kind)
    whiteness = {1: (0.0,), 2: (0.0, 0.62), 3: (0.0, 0.62, 0.32)}.get(num_groups, (0.0, 0.62, 0.32, 0.76, 0.16, 0.48))
    return tuple(mix(base, "#FFFFFF", w) for w in whiteness[:num_groups])


def mix(colour: str, other: str, share: float) -> str:
    """`colour` with `share` (0 to 1) of `other`, both "#rrggbb"."""
    pairs = zip(_channels(colour), _channels(other), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def fade(colour: str, opacity: float) -> str:
    """`colour` ("#rrggbb") let through: it takes on the page's own light or dark."""
    return f"rgba({','.join(map(str, _channels(colour)))},{opacity})"


def ink_on(colour: str) -> str:
    """Black or white, whichever reads better on `colour` (WCAG relative luminance)."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in _channels(colour))]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if luminance > 0.179 else "#FFFFFF"


def layout(*, height: int) -> dict[str, Any]:
    """What every figure's layout begins with: no background of its own, readable ink, width of the page."""
    axis = {"gridcolor": GRID, "linecolor": GRID, "zerolinecolor": GRID, "automargin": True}
    return {
        "template": {"layout": {"xaxis": axis, "yaxis": axis}},
        "height": height,
        "autosize": True,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 12, "color": INK},
        "hoverlabel": {"align": "left", "font": {"family": FONT, "size": 12}},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "xanchor": "left"},
        "dragmode": "zoom",
    }


def _family(kind: str) -> str:
    """The family of the last word that is one: "my_tp" is tp."""
    return next((word for word in reversed(kind.lower().split("_")) if word in _HUES), "other")


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
