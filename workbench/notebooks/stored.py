"""How a notebook is stored: run on real ranks, with outputs that are the same wherever they are compared.

No widget state and no widget views: a saved notebook without its kernel cannot show them, GitHub refuses some of them,
and one plotly widget alone would weigh five megabytes.
"""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets.config import Config

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
CHECKED = "nbval-check-output"
"""The tag of a cell whose stored output pytest --nbval-lax compares."""

_KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
_CELL_KEPT = ("tags",)
_ENCRYPTED = Config(
    {"KernelManager": {"transport_encryption": "auto"}}
)  # other users of this machine do not read along


def run_notebook(path: Path, *, timeout_s: float = 300.0) -> NotebookNode:
    """Run every cell in a new kernel beside the file, and give the notebook with what came out, cleaned.

    Ranks' output is printed once and sorted, as it is under pytest. timeout_s: for one cell.
    Raises: nbclient's CellExecutionError with the traceback of the cell that failed.
    """
    notebook: NotebookNode = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]  # nbformat's
    client = NotebookClient(
        notebook,
        timeout=int(timeout_s),
        kernel_name="python3",
        config=_ENCRYPTED,
        resources={"metadata": {"path": str(path.parent)}},
        store_widget_state=False,
        record_timing=False,
    )
    client.execute(env={**os.environ, "WORKBENCH_TEST": "1"})
    clean_notebook(notebook)
    return notebook


def clean_notebook(notebook: NotebookNode) -> None:
    """Take out, in place, what a stored notebook must not hold: widgets, times, and metadata of one machine."""
    notebook["metadata"] = nbformat.from_dict(  # type: ignore[no-untyped-call]  # nbformat's
        {"kernelspec": dict(_KERNEL), "language_info": {"name": "python"}}
    )
    for cell in notebook["cells"]:
        cell["metadata"] = {name: cell["metadata"][name] for name in _CELL_KEPT if name in cell["metadata"]}
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop(WIDGET_VIEW, None)
    nbformat.validate(notebook)
