"""Pins cleaning, twins and copies of notebooks: widgets go, figures get pictures, nobody's file is written over."""

from __future__ import annotations

import base64
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from workbench.errors import ResourceError
from workbench.notebooks import (
    add_twins,
    clean_notebook,
    copy_notebooks,
    find_browser,
    find_notebooks,
    notebook_html,
)
from workbench.ranks import GroupMap
from workbench.views import PLOTLY, show_group_map


def with_figure() -> Any:
    data = dict(show_group_map(GroupMap.build("vllm", tp=2)).data)
    data["application/vnd.jupyter.widget-view+json"] = {"model_id": "1"}
    output = new_output("execute_result", data, execution_count=1)
    metadata = {"tags": ["kept"], "execution": {"iopub.status.busy": "2026-11-29T00:00:00Z"}}
    cell = new_code_cell("map", execution_count=1, outputs=[output], metadata=metadata)
    widgets = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    return new_notebook(
        cells=[cell], metadata={"widgets": widgets, "language_info": {"name": "python", "version": "3.11.7"}}
    )


def test_cleaning_takes_widgets_times_and_versions_out_and_keeps_the_figure() -> None:
    notebook = with_figure()
    clean_notebook(notebook)
    assert "widgets" not in notebook["metadata"]
    assert notebook["metadata"]["language_info"] == {"name": "python"}
    assert notebook["cells"][0]["metadata"] == {"tags": ["kept"]}
    assert set(notebook["cells"][0]["outputs"][0]["data"]) == {PLOTLY, "text/plain"}


def test_a_figure_gets_a_picture_drawn_from_what_is_stored() -> None:
    if find_browser() is None:
        pytest.skip("no Chromium or Chrome on this machine; install one or set BROWSER_PATH to draw pictures")
    notebook = with_figure()
    assert add_twins(notebook) == 1
    output = notebook["cells"][0]["outputs"][0]
    png = base64.b64decode(output["data"]["image/png"])
    size = output["metadata"]["image/png"]
    assert png.startswith(b"\x89PNG")
    assert int.from_bytes(png[16:20], "big") == round(1.5 * size["width"])  # IHDR: sharp on dense screens
    assert len(png) > 5_000
    nbformat.validate(notebook)


def test_figures_without_a_browser_are_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BROWSER_PATH", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ResourceError, match=r"1 figures and no Chromium.*BROWSER_PATH"):
        add_twins(with_figure())
    assert add_twins(new_notebook()) == 0


def test_a_page_has_live_figures_and_asks_the_network_for_nothing(tmp_path: Path) -> None:
    notebook = with_figure()
    notebook["cells"][0]["outputs"][0]["data"][PLOTLY]["layout"]["title"]["text"] = "</script><b>out</b>"
    page = notebook_html(notebook, title="map")
    assert "<title>map</title>" in page
    assert "Plotly.newPlot('figure-0'" in page
    assert "<b>out</b>" not in page
    assert 'src="http' not in page
    assert 'rel="stylesheet"' not in page
    browser = find_browser()
    if browser is None:
        pytest.skip("no Chromium or Chrome on this machine; install one or set BROWSER_PATH to see the page drawn")
    (tmp_path / "map.html").write_text(page)
    address = (tmp_path / "map.html").as_uri()
    headless = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000"]
    done = subprocess.run([*headless, "--dump-dom", address], capture_output=True, text=True, timeout=90, check=True)
    assert 'class="main-svg"' in done.stdout


def test_the_command_writes_a_page_and_leaves_the_notebook_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "map.ipynb"
    nbformat.write(with_figure(), path)
    before = path.read_bytes()
    command = [sys.executable, "-m", "workbench.notebooks", "--html", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    assert done.stdout == f"{tmp_path / 'map.html'}: a page with live figures\n"
    assert "Plotly.newPlot('figure-0'" in (tmp_path / "map.html").read_text()
    assert path.read_bytes() == before


def test_a_notebook_is_run_with_messages_that_nobody_reads_along(tmp_path: Path) -> None:
    path = tmp_path / "small.ipynb"
    source = "from ipykernel.connect import get_connection_info; print(sorted(get_connection_info(unpack=True)))"
    nbformat.write(new_notebook(cells=[new_code_cell(source)]), path)
    done = subprocess.run(
        [sys.executable, "-m", "workbench.notebooks", "--run", str(path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "'curve_secretkey'" in nbformat.read(path, as_version=4)["cells"][0]["outputs"][0]["text"]


def test_copies_never_write_over_a_file_that_is_there(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "place"
    first = copy_notebooks(directory)
    assert "00_start_here.ipynb" in first.written
    assert (first.equal, first.kept) == ((), ())
    changed = directory / first.written[0]
    changed.write_text("mine")
    again = copy_notebooks(directory)
    assert (again.written, again.kept) == ((), (changed.name,))
    assert set(again.equal) == set(first.written) - {changed.name}
    assert changed.read_text() == "mine"


def test_the_notebooks_of_a_clone_are_found_in_it() -> None:
    assert [path.name for path in find_notebooks()][:2] == ["00_start_here.ipynb", "01_subgroup_rank_mapping.ipynb"]
