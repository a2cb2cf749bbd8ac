"""report.html of the X-ray: the figure begins after the start-up, evidence wraps in its box."""

from __future__ import annotations

import re
from pathlib import Path

from tests.diagnose.made import Made, group
from workbench.trace import Trace
from workbench.xray import write_report
from workbench.xray.verdict import judge_trace

WORLD = group("world", 0, 1)


def page(made: Made, directory: Path) -> str:
    trace: Trace = made.trace()
    return write_report(
        directory / "report.html", judge_trace(trace, now_ns=None), command="torchrun train.py", command_status=0
    ).read_text()


def start_up(made: Made) -> None:
    begun = [made.begin(r, "init_process_group", WORLD) for r in (0, 1)]
    made.now_us += 4_000_000
    for event in begun:
        made.end(event)


def test_the_figure_begins_after_the_start_up_and_tells_it_in_words(tmp_path: Path) -> None:
    made = Made(2)
    start_up(made)
    for r in (0, 1):
        made.call(r, "all_reduce", WORLD)
    made.exit(0, 1)
    text = page(made, tmp_path)
    assert "The start-up took 4.0 s (init_process_group); the figure and its times begin after it." in text
    twin = re.search(r"2 ranks, (1 call), (\S+ \S+)\n", text)
    assert twin is not None, "the text twin's title"
    assert twin[2].endswith("µs"), "the axis no longer holds the start-up"


def test_a_start_up_that_hangs_is_all_there_is_to_show(tmp_path: Path) -> None:
    made = Made(2)
    made.begin(0, "init_process_group", WORLD)
    made.exit(1)
    text = page(made, tmp_path)
    assert "The start-up took" not in text
    assert "init_process_group #" in text


def test_evidence_wraps_and_drawings_do_not(tmp_path: Path) -> None:
    made = Made(2)
    start_up(made)
    made.begin(0, "all_reduce", WORLD)
    made.exit(1)
    text = page(made, tmp_path)
    assert re.search(r'<pre class=wraps tabindex="0">rank 0 B all_reduce', text)
    assert "pre.wraps { white-space: pre-wrap; overflow-wrap: anywhere; }" in text
    assert re.search(r'<summary>As text</summary><pre tabindex="0">', text)
