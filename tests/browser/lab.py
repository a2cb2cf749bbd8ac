"""JupyterLab as a user meets it: `workbench lab` in a process of its own, a page of it in a real headless Chromium."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parent.parent.parent

# What Lab 4 itself writes to the console as errors on a healthy page, without any notebook of ours.
HARMLESS = (
    "Failed to load resource: the server responded with a status of 404",  # optional files: favicon, workspaces
)

SETTINGS = {
    # all cells in the page at once, so that the test sees each of them
    "notebook-extension/tracker.jupyterlab-settings": '{"windowingMode": "none"}',
}


@contextmanager
def serve(directory: Path, private: Path, *, dark: bool = False) -> Iterator[str]:
    """`workbench lab` on `directory`, with empty settings of its own under `private`; gives the address with token."""
    settings = private / "settings" / "@jupyterlab"
    chosen = dict(SETTINGS)
    if dark:
        chosen["apputils-extension/themes.jupyterlab-settings"] = '{"theme": "JupyterLab Dark"}'
    for name, text in chosen.items():
        (settings / name).parent.mkdir(parents=True, exist_ok=True)
        (settings / name).write_text(text)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "WORKBENCH_DEVICE": "cpu",
        "JUPYTER_CONFIG_DIR": str(private / "config"),
        "JUPYTER_RUNTIME_DIR": str(private / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(private / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(private / "workspaces"),
    }
    log = private / "lab.log"
    command = [sys.executable, "-m", "workbench", "lab", "--no-browser", "--port", "0", "--dir", str(directory)]
    with log.open("w") as file:
        process = subprocess.Popen(command, stderr=file, stdout=file, env=environment, cwd=private)
    try:
        yield _await_address(process, log)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        finally:
            process.kill()
    assert process.returncode == 130, log.read_text()


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


def _await_address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = re.search(r"http://127\.0\.0\.1:\d+/lab\S*\?token=[0-9a-f]{48}", log.read_text())
        if found:
            return found[0]
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    raise TimeoutError(f"no address within 60 s: {log.read_text()}")
