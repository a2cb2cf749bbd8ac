"""Static twins: a picture beside each stored figure, for GitHub, HTML exports and paper, where no plotly runs.

The picture is drawn by kaleido from the figure as it is stored, never a second time from the data; so a notebook that
ran on a machine without a browser gets its pictures afterwards.
"""

from __future__ import annotations

import base64
import os
import shutil

import plotly.graph_objects as go
from nbformat import NotebookNode

from workbench.errors import ResourceError
from workbench.views import PLOTLY

WIDTH_PX = 860
_SCALE = 1.5
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str | None:
    """A Chromium or Chrome: BROWSER_PATH, else the first on PATH, else None."""
    return os.environ.get("BROWSER_PATH") or next(filter(None, map(shutil.which, _NAMES)), None)


def add_twins(notebook: NotebookNode) -> int:
    """Give every stored figure a PNG of itself, in place, and say how many there are.

    PNG: every viewer shows it, and nbval compares none. Its ground is clear, as the figure's is.
    Raises: ResourceError if there are figures and no browser to draw them.
    """
    outputs = [o for cell in notebook["cells"] for o in cell.get("outputs", ()) if PLOTLY in o.get("data", {})]
    if not outputs:
        return 0
    browser = find_browser()
    if browser is None:
        raise ResourceError(
            f"{len(outputs)} figures and no Chromium or Chrome to draw their pictures; install one, or set "
            f"BROWSER_PATH, and run `python -m workbench.notebooks` again: nothing else needs to run anew"
        )
    try:
        import kaleido
    except ImportError as e:
        raise ResourceError(f"{len(outputs)} figures, and kaleido is not installed; pip install kaleido") from e
    kaleido.start_sync_server(n=1, path=browser, mathjax=False, silence_warnings=True)
    try:
        for output in outputs:
            figure = go.Figure(output["data"][PLOTLY])
            size = {"width": WIDTH_PX, "height": int(figure.layout.height or 450)}
            picture = kaleido.calc_fig_sync(figure, opts={"format": "png", "scale": _SCALE, **size})
            output["data"]["image/png"] = base64.b64encode(picture).decode() + "\n"
            output.setdefault("metadata", {})["image/png"] = size
    finally:
        kaleido.stop_sync_server(silence_warnings=True)
    return len(outputs)
