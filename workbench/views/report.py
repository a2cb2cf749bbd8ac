"""One HTML file: headings, texts, tables and figures; readable offline, in light and dark, and on paper."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from importlib.resources import files

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph. Plain text; empty lines part paragraphs."""

    text: str


@dataclass(frozen=True, slots=True)
class Code:
    """Text as it stands, in a fixed width. `wraps`: lines too long for the page go on below; else it scrolls."""

    text: str
    wraps: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a head. Numbers stand to the right."""

    head: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure and its text twin, which is folded away once the figure stands: without scripts it is all there is.

    On a narrower page than `min_width_px` the figure scrolls sideways.
    """

    figure: go.Figure
    twin: str
    caption: str = ""
    min_width_px: int = 560


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands under it."""

    heading: str
    parts: tuple[Text | Code | Table | Picture, ...]


def report_html(title: str, sections: Iterable[Section]) -> str:
    """A whole page that asks the network for nothing; its content policy forbids it to.

    plotly.js is written into it once, if there is a figure (4.8 MB). Every text is escaped. Equal input, equal page.
    """
    pieces: list[str] = []
    figures: list[go.Figure] = []
    for section in sections:
        parts = []
        for part in section.parts:
            if isinstance(part, Picture):
                parts.append(_picture(part, len(figures)))
                figures.append(part.figure)
            else:
                parts.append(_plain(part))
        pieces.append(f"<section>\n<h2>{escape(section.heading)}</h2>\n{chr(10).join(parts)}\n</section>")
    scripts = [get_plotlyjs(), _asset("report.js")] if figures else []
    data = "\n".join(
        f'<script type="application/json" id="figure-{n}-data">{_json(figure)}</script>'
        for n, figure in enumerate(figures)
    )
    return _PAGE.format(
        policy=_policy(scripts),
        title=escape(title),
        style=_asset("report.css"),
        body="\n".join(pieces),
        data=data,
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{body}
</main>
{data}
{scripts}
</body>
</html>
"""


def _plain(part: Text | Code | Table) -> str:
    if isinstance(part, Text):
        return "\n".join(f"<p>{escape(p.strip())}</p>" for p in part.text.split("\n\n") if p.strip())
    if isinstance(part, Code):
        return f'<pre{" class=wraps" if part.wraps else ""} tabindex="0">{escape(part.text)}</pre>'
    head = "".join(f'<th scope="col">{escape(h)}</th>' for h in part.head)
    rows = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in part.rows)
    caption = f"<caption>{escape(part.caption)}</caption>" if part.caption else ""
    return f'<div class="wide"><table>{caption}<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>'


def _cell(value: object) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"<td{' class=number' if is_number else ''}>{escape(str(value))}</td>"


def _picture(part: Picture, number: int) -> str:
    caption = f"<figcaption>{escape(part.caption)}</figcaption>" if part.caption else ""
    height = int(part.figure.layout.height or 450)
    plot = f'<div class="plot" id="figure-{number}" style="height:{height}px;min-width:{part.min_width_px}px"></div>'
    twin = f'<summary>As text</summary><pre tabindex="0">{escape(part.twin)}</pre>'
    return f'<figure>\n<div class="wide">{plot}</div>\n{caption}<details class="twin" open>{twin}</details>\n</figure>'


def _json(figure: go.Figure) -> str:
    """The figure as JSON that can stand inside a script element whatever its texts hold."""
    text = json.dumps(json.loads(figure.to_json()), separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _policy(scripts: Iterable[str]) -> str:
    """Only the scripts written here may run, by their digests; nothing may be fetched."""
    digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    allowed = " ".join(f"'sha256-{d}'" for d in digests) or "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _asset(name: str) -> str:
    return files("workbench.views").joinpath(name).read_text(encoding="utf-8")
