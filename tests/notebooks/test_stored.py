"""Pins what the stored notebooks hold: real outputs, compared cells, pictures; no widgets, nothing of one machine."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest

from workbench import GroupMap
from workbench.views import PLOTLY

ROOT = Path(__file__).parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LARGEST_FIGURE = 300_000  # bytes

every = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> Any:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def code(path: Path) -> list[Any]:
    return [cell for cell in read(path)["cells"] if cell["cell_type"] == "code"]


def outputs(path: Path) -> list[Any]:
    return [output for cell in code(path) for output in cell["outputs"]]


def test_there_are_notebooks_to_check() -> None:
    assert {"00_start_here", "01_subgroup_rank_mapping"} <= {path.stem for path in NOTEBOOKS}


@every
def test_every_cell_was_run_once_and_in_order(path: Path) -> None:
    assert [cell["execution_count"] for cell in code(path)] == list(range(1, len(code(path)) + 1))
    assert not [o for o in outputs(path) if o["output_type"] == "error"]
    told = "".join(o["text"] for o in outputs(path) if o.get("name") == "stderr")
    assert "Traceback" not in told
    assert "Warning" not in told


@every
def test_at_least_five_cells_are_compared_and_each_has_an_output(path: Path) -> None:
    compared = [cell for cell in code(path) if "nbval-check-output" in cell["metadata"].get("tags", ())]
    assert len(compared) >= 5
    assert all(cell["outputs"] for cell in compared)


@every
def test_compared_outputs_know_no_machine(path: Path) -> None:
    """No time, pid, address, object id, path or figure: equal on every machine, on CPU and GPU."""
    machine = re.compile(r"\b\d+(\.\d+)? ?(us|µs|ms|s)\b|\bpid|127\.0\.0\.1|0x[0-9a-f]{4}|/tmp|/home|cuda|cpu", re.I)
    checked = 0
    for cell in code(path):
        if "nbval-check-output" in cell["metadata"].get("tags", ()):
            for output in cell["outputs"]:
                assert PLOTLY not in output.get("data", {})
                text = json.dumps([output.get("text", ""), output.get("data", {})])
                assert not machine.search(text), (cell["id"], machine.search(text))
                checked += 1
    assert checked >= 5


@every
def test_nothing_stored_holds_a_path_of_the_machine_that_ran_it(path: Path) -> None:
    """In hover texts neither. A file of the traced program is told by its path, as its author would want it."""
    of_a_machine = re.compile(r"ipykernel_\d|/(tmp|home|root|usr|opt|mnt|var)/|site-packages")
    of_the_program = re.compile(r"/tmp/xray-\w+/(program|quiet)\.py")
    assert of_a_machine.search("&lt;module&gt; (/tmp/ipykernel_32592/107512157.py:4)")
    checked = 0
    for cell in code(path):
        for output in cell["outputs"]:
            text = of_the_program.sub("", json.dumps({k: v for k, v in output.items() if k != "metadata"}))
            text = re.sub(r'"image/png": "[^"]*"', "", text)  # base64 has slashes of its own
            assert not of_a_machine.search(text), (cell["id"], of_a_machine.search(text))
            checked += 1
    assert checked > 10


@every
def test_no_widget_and_no_plotly_script_is_stored(path: Path) -> None:
    assert set(read(path)["metadata"]) == {"kernelspec", "language_info"}
    kinds = {kind for output in outputs(path) for kind in output.get("data", {})}
    assert kinds <= {PLOTLY, "image/png", "text/html", "text/markdown", "text/plain"}
    assert "FigureWidget" not in path.read_text(encoding="utf-8")
    assert all(set(cell["metadata"]) <= {"tags"} for cell in read(path)["cells"])


@every
def test_every_figure_is_small_and_has_its_picture(path: Path) -> None:
    figures = [output for output in outputs(path) if PLOTLY in output.get("data", {})]
    assert len(figures) >= 3
    for output in figures:
        for kind, data in output["data"].items():
            assert len(data if isinstance(data, str) else json.dumps(data)) < LARGEST_FIGURE, kind
        png = base64.b64decode(output["data"]["image/png"])
        assert png.startswith(b"\x89PNG")
        size = output["metadata"]["image/png"]
        assert size["height"] == output["data"][PLOTLY]["layout"]["height"]
        assert 600 < size["width"] < 1000


@every
def test_the_first_cell_asks_one_question_and_the_last_can_be_checked(path: Path) -> None:
    cells = read(path)["cells"]
    title = cells[0]["source"].splitlines()[0]
    assert title.startswith("# ")
    assert title.endswith("?")
    for promise in ("**You will see**", "**It needs**", "**It takes**"):
        assert promise in cells[0]["source"]
    assert cells[-1]["source"].startswith("answer = None")
    assert cells[-1]["outputs"][0]["text"] == "no answer yet\n"


@every
def test_the_exercise_says_right_to_the_right_answer_and_not_yet_to_others(path: Path) -> None:
    """A notebook without an answer here is a KeyError: every exercise is checked."""
    answers = {
        "00_start_here": ((4, 5, 6, 7), (2, 6)),
        "01_subgroup_rank_mapping": ((3, 1), (1, 3)),
        "02_cp_fusion": (11110000, 1111),
        "03_dp_pp_rendezvous": ((4, 5), (1, 5)),
        "04_tp16_mnnvl": ("attention_tp", "tp"),
        "05_capture": ((1, 3), (0, 2)),
        "06_measure_and_tune": ((7, 1.75), (8, 2)),
        "07_xray": ((3,), (3, 4)),
    }
    source = read(path)["cells"][-1]["source"]
    told = []
    for answer in answers[path.stem]:
        said: list[str] = []
        group_map = GroupMap.build("sglang", tp=4, attn_cp=2)  # as the cluster of notebook 05 has it
        names = {"print": said.append, "cluster": SimpleNamespace(group_map=group_map)}
        head = "from workbench import GroupMap\nfrom workbench.why import explain\n"
        exec(head + source.replace("answer = None", f"answer = {answer!r}", 1), names)
        told += said
    assert told[0] == "right"
    assert told[1].startswith("not yet")
