"""A page of JupyterLab in a real headless Chromium, used as a person would use it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from playwright.sync_api import Page, sync_playwright

# What Lab 4 itself writes to the console as errors on a healthy page, without any notebook of ours.
HARMLESS = (
    "Failed to load resource: the server responded with a status of 404",  # optional files: favicon, workspaces
)


@contextmanager
def browse(chromium: str) -> Iterator[tuple[Page, list[str]]]:
    """A page of 1200 px, and the list that collects its console errors."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.set_default_timeout(60_000)
        errors: list[str] = []
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: errors.append(str(e)))
        try:
            yield page, errors
        finally:
            browser.close()


def open_notebook(page: Page, address: str, name: str) -> None:
    """Open a notebook in a clean workspace and wait for its kernel."""
    base, _, token = address.partition("?")
    page.goto(f"{base.partition('/lab')[0]}/lab/tree/{name}?reset&{token}")
    page.wait_for_selector(".jp-NotebookPanel .jp-Cell")
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()


def run_all(page: Page, num_code_cells: int) -> None:
    """Run > Run All Cells, and wait until the last cell has its number."""
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()
    deadline = time.monotonic() + 90
    prompts: list[str] = []
    while time.monotonic() < deadline:
        prompts = page.locator(".jp-NotebookPanel .jp-CodeCell .jp-InputPrompt").all_inner_texts()
        if prompts[-1].strip() == f"[{num_code_cells}]:" or failures(page):
            return
        page.wait_for_timeout(100)
    raise TimeoutError(f"after 90 s the cells stand at {prompts}")


def failures(page: Page) -> list[str]:
    """The texts of failed cells and of what was written to stderr."""
    kinds = ("application/vnd.jupyter.error", "application/vnd.jupyter.stderr")
    found = page.locator(", ".join(f'.jp-NotebookPanel [data-mime-type="{kind}"]' for kind in kinds))
    return found.all_inner_texts()


def unexpected(errors: list[str]) -> list[str]:
    """The console errors that are not known to be harmless."""
    return [text for text in errors if not text.startswith(HARMLESS)]


def strip_outputs(source: Path, target: Path) -> int:
    """Write `source` without outputs, so that all the page shows was made there; gives the number of code cells."""
    notebook: Any = nbformat.read(source, as_version=4)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell in code:
        cell["outputs"], cell["execution_count"] = [], None
    nbformat.write(notebook, target)
    return len(code)
