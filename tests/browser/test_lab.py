"""Pins what a user sees in Lab: both notebooks run on real CPU ranks in a real browser, and nothing complains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="playwright is not installed; pip install '.[test]' to drive the browser")

from playwright.sync_api import Page

from tests.browser.lab import browse, failures, open_notebook, run_all, strip_outputs, unexpected
from tests.notebooks.serving import ROOT, serve
from workbench.notebooks import find_browser

CHROMIUM = find_browser()
FIGURES = {"00_start_here": 6, "01_subgroup_rank_mapping": 3}

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium or Chrome on this machine; install one or set BROWSER_PATH to test the pages"
)


@pytest.mark.timeout(240)
def test_both_notebooks_run_in_lab_and_the_explorer_answers_a_slider(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    directory, private = tmp_path / "notebooks", tmp_path / "private"
    directory.mkdir()
    private.mkdir()
    cells = {n: strip_outputs(ROOT / "notebooks" / f"{n}.ipynb", directory / f"{n}.ipynb") for n in FIGURES}
    with serve(directory, private) as address, browse(CHROMIUM) as (page, errors):
        for name, num_cells in cells.items():
            open_notebook(page, address, f"{name}.ipynb")
            run_all(page, num_cells)
            assert failures(page) == []
            drawn = page.locator(".jp-NotebookPanel .js-plotly-plot .main-svg:first-child")
            for n in range(FIGURES[name]):
                drawn.nth(n).scroll_into_view_if_needed()
                box = drawn.nth(n).bounding_box()
                assert box is not None
                assert box["width"] > 500
                assert box["height"] > 90
            assert drawn.count() == FIGURES[name]
            assert page.get_by_text("Would you like to").count() == 0  # no news, no update pop-up
            page.screenshot(path=tmp_path / f"{name}.png")
            if name == "00_start_here":
                _move_the_slider(page)
        assert unexpected(errors) == []


def _move_the_slider(page: Page) -> None:
    """attn_cp from 2 to 3, which is impossible with tp=8: explained, with a button for what is; then on to 4."""
    control = page.locator(".widget-slider", has_text="attn_cp")
    handle = control.locator(".noUi-handle")
    handle.focus()
    handle.press("ArrowRight")
    alert = page.locator('.jp-NotebookPanel [role="alert"]')
    alert.wait_for()
    assert "tp=8 cannot be cut into attn_dp=1 * attn_cp=3 attention groups" in alert.inner_text()
    assert page.locator(".gtitle", has_text="sglang tp=8 attn_cp=2").count() == 1  # the last legal map still stands
    page.get_by_role("button", name="attn_cp = 2").click()
    alert.wait_for(state="detached")
    handle.press("ArrowRight")
    alert.wait_for()
    handle.press("ArrowRight")
    page.locator(".gtitle", has_text="sglang tp=8 attn_cp=4").first.wait_for()  # for a moment there are two
    alert.wait_for(state="detached")


@pytest.mark.parametrize("name", FIGURES)
def test_an_html_export_shows_every_figure_without_a_network(name: str, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    command = ["-m", "nbconvert", "--to", "html", "--output-dir", str(tmp_path), f"notebooks/{name}.ipynb"]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True, timeout=100)
    with browse(CHROMIUM) as (page, _):
        page.context.set_offline(True)
        page.goto((tmp_path / f"{name}.html").as_uri())
        pictures = page.locator(".jp-OutputArea-output img")
        assert pictures.count() == FIGURES[name]
        for n in range(FIGURES[name]):
            assert pictures.nth(n).evaluate("i => i.complete && i.naturalWidth") == 1290
            box = pictures.nth(n).bounding_box()
            assert box is not None
            assert box["width"] == 860
