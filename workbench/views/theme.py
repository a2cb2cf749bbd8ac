"""Colours and measures of every figure: one hue a kind, the same everywhere, told apart without red against green.

Hues: after Okabe and Ito's palette for colour-blind readers. Ink and grid are greys that can be read on white and on
black, so that one figure serves light and dark pages; the report sharpens them to the page's own ink.
"""

from __future__ import annotations

import zlib
from typing import Any

INK = "#757575"
GRID = "rgba(128,128,128,0.28)"
FAINT = "rgba(128,128,128,0.14)"
ALARM = "#D55E00"
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"

# Family -> base, lighter and darker tone. Chosen so that black or white letters stay readable on every shade.
_TONES = {
    "world": ("#6B7280", "#A4A9B3", "#4B5563"),
    "tp": ("#0072B2", "#56B4E9", "#004B76"),
    "cp": ("#E69F00", "#F2C45C", "#A87300"),
    "dp": ("#007A5A", "#5CC5A4", "#00543E"),
    "ep": ("#B8482A", "#E89B80", "#8A2F18"),
    "pp": ("#A8487F", "#D99BC0", "#7A2F5B"),
    "other": ("#6A5FB0", "#A8A0DC", "#463C85"),
}
_BASE, _LIGHT, _DARK = 0, 1, 2

# A kind that is not here is read by its words ("my_tp" belongs to tp), or takes one of the tones of "other".
_KINDS = {
    "attention_tp": ("tp", _LIGHT),
    "moe_tp": ("tp", _DARK),
    "etp": ("tp", _DARK),
    "tp_ep": ("tp", _LIGHT),
    "ep_tp": ("tp", _DARK),
    "tp_cp": ("cp", _DARK),
    "dcp": ("cp", _LIGHT),
    "pcp": ("cp", _DARK),
    "moe_dp": ("dp", _DARK),
    "edp": ("dp", _DARK),
    "ep_dp": ("dp", _DARK),
    "dp_cp": ("dp", _LIGHT),
    "eplb": ("ep", _LIGHT),
    "self_pp": ("pp", _LIGHT),
    "embd": ("pp", _LIGHT),
    "pos_embd": ("pp", _DARK),
    "mp": ("other", _BASE),
    "tp_dp_cp": ("other", _LIGHT),
    "tp_dp": ("other", _DARK),
    "tp_ep_pp": ("other", _LIGHT),
    "default_pg": ("world", _BASE),
}


def kind_colour(kind: str) -> str:
    """The colour of a kind as "#rrggbb", the same in every figure; "tp[0,1]", one of its groups, has it too."""
    kind = kind.partition("[")[0]
    family, tone = _KINDS.get(kind) or _read(kind)
    return _TONES[family][tone]


def group_shades(kind: str, num_groups: int) -> tuple[str, ...]:
    """Shades of the kind's colour for its groups, at most five, ordered so that neighbours differ clearly.

    Group n has shade n % len(shades).
    """
    base = kind_colour(kind)
    return tuple(mix(base, "#FFFFFF", whiteness) for whiteness in (0.0, 0.7, 0.5, 0.82, 0.6)[:num_groups])


def mix(colour: str, other: str, share: float) -> str:
    """`colour` with `share` (0 to 1) of `other`, both "#rrggbb"."""
    pairs = zip(_channels(colour), _channels(other), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def fade(colour: str, opacity: float) -> str:
    """`colour` ("#rrggbb") let through: it takes on the page's own light or dark."""
    return f"rgba({','.join(map(str, _channels(colour)))},{opacity})"


def layout(title: str, *, height: int, subtitle: str = "") -> dict[str, Any]:
    """What every figure's layout begins with: no background of its own, readable ink, width of the page."""
    axis = {"gridcolor": GRID, "linecolor": GRID, "zerolinecolor": GRID, "automargin": True}
    return {
        "template": {"layout": {"xaxis": axis, "yaxis": axis}},
        "title": {
            "text": title,
            "font": {"size": 13},
            "subtitle": {"text": subtitle, "font": {"size": 11}},
            **{"x": 0, "xref": "paper", "xanchor": "left"},
            **{"y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 8}},
        },
        "height": height,
        "autosize": True,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 12, "color": INK},
        "hoverlabel": {"align": "left", "font": {"family": FONT, "size": 12}},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "xanchor": "left"},
        "dragmode": "zoom",
        # plotly.js 4 offers by default to send the figure to a company's server; a trace is nobody else's business.
        "modebar": {"remove": ["sendChartToCloud", "select2d", "lasso2d", "autoScale2d"]},
    }


def _read(kind: str) -> tuple[str, int]:
    """Family and tone of a kind that is not listed."""
    family = next((word for word in reversed(kind.lower().split("_")) if word in _TONES), "other")
    return family, zlib.crc32(kind.encode()) % 3 if family == "other" else _BASE


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
