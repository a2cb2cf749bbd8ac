"""A notebook as one HTML page whose figures are live: for readers without Jupyter, drawn by no browser beforehand.

nbconvert alone shows a figure's text there, since it knows nothing of plotly.
"""

from __future__ import annotations

import copy
import json

from nbformat import NotebookNode
from plotly.offline import get_plotlyjs

from workbench.views import PLOTLY


def notebook_html(notebook: NotebookNode, *, title: str) -> str:
    """The page, with plotly.js in it once if there is a figure (4.8 MB). It asks the network for nothing."""
    from nbconvert import HTMLExporter  # it takes a second to import

    page = copy.deepcopy(notebook)
    outputs = [o for cell in page["cells"] for o in cell.get("outputs", ()) if PLOTLY in o.get("data", {})]
    for number, output in enumerate(outputs):
        library = f"<script>{get_plotlyjs()}</script>" if number == 0 else ""
        output["data"] = {"text/html": library + _figure(output["data"][PLOTLY], number)}
    exporter = HTMLExporter(require_js_url="", mathjax_url="", jquery_url="")  # type: ignore[no-untyped-call]  # nbconvert's
    html, _ = exporter.from_notebook_node(page, {"metadata": {"name": title}})
    return str(html)


def _figure(figure: object, number: int) -> str:
    """A place on the page and the script that draws there. No text of the figure can end the script."""
    text = json.dumps(figure).replace("<", "\\u003c")
    return (
        f'<div id="figure-{number}"></div><script>{{const figure = {text};'
        f"Plotly.newPlot('figure-{number}', figure.data, figure.layout, {{responsive: true, displaylogo: false}});}}"
        f"</script>"
    )
