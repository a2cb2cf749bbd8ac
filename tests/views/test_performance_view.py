"""Pins the pictures of comparisons: ours stands out, whiskers at p10 and p90, ratios, the cost model, text, tables."""

from __future__ import annotations

from dataclasses import replace

from tests.measure.made import comparison, row
from workbench.trace import Scenario
from workbench.views import curves_figure, performance_figure, performance_markdown, performance_text

ROWS = (
    replace(row(1, 10.0, 20.0), simulated_us=9.5),
    replace(row(1024, 100.0, 120.0), simulated_us=95.0, left_out=(("x", "no <b>GPU</b> here"),)),
    row(8, 50.0, 40.0, Scenario.SKEWED),
)
MADE = comparison(*ROWS, command="workbench measure fused", torch="2.11")


def test_lines_say_the_columns_and_ours_stands_out() -> None:
    figure = performance_figure(MADE)
    ours, peer, model, ratio = figure.data
    assert (ours.name, tuple(ours.x), tuple(ours.y)) == ("ours (custom)", (1, 1024), (10.0, 100.0))
    assert tuple(round(v, 6) for v in ours.error_y.array) == (0.2, 2.0)
    assert tuple(round(v, 6) for v in ours.error_y.arrayminus) == (0.2, 2.0)
    assert (peer.name, tuple(peer.y)) == ("NCCL + norm", (20.0, 120.0))
    assert ours.line.width > peer.line.width
    assert ours.line.color != peer.line.color
    assert (model.name, tuple(model.y)) == ("cost model (simulated)", (9.5, 95.0))
    assert [round(v, 3) for v in ratio.y] == [0.5, 0.833]
    assert figure.layout.xaxis.ticktext == ("1", "1K")


def test_a_scenario_is_drawn_alone_and_without_a_model_there_is_no_line_of_it() -> None:
    figure = performance_figure(MADE, Scenario.SKEWED)
    assert [trace.name for trace in figure.data] == ["ours (custom)", "NCCL + norm", None]
    assert tuple(figure.data[2].y) == (50.0 / 40.0,)


def test_the_text_has_a_table_a_scenario_and_says_what_is_missing_and_what_is_wrong() -> None:
    wrong = comparison(replace(row(8, None, 40.0), wrong=(("custom", "sum: 3 of 9 elements differ"),)))
    text = performance_text(MADE)
    assert [block.splitlines()[0] for block in text.split("\n\n")] == [
        "hidden 4096, bfloat16, 2 ranks on NVIDIA H200: all ranks come together",
        "hidden 4096, bfloat16, 2 ranks on NVIDIA H200: one rank comes late, time from its arrival",
    ]
    assert text.splitlines()[2].split() == [
        "1", "10.00", "9.80", "to", "10.20", "20.00", "NCCL", "+", "norm", "0.500", "0.490", "to", "0.510", "9.50",
    ]  # fmt: skip
    assert text.splitlines()[4] == (
        "ours / best peer: below 1, ours is faster; simulated: us that the cost model says of ours"
    )
    assert "left out: x: no <b>GPU</b> here" in text
    assert "WRONG at 8 tokens: custom: sum: 3 of 9 elements differ" in performance_text(wrong)
    assert performance_text(wrong).splitlines()[2].split()[:2] == ["8", "-"]  # no speed-up for a wrong result


def test_columns_that_hold_nothing_are_left_away() -> None:
    skewed = performance_text(MADE).split("\n\n")[1]
    assert ("simulated" in skewed, "again" in skewed, "ours / best peer" in skewed) == (False, False, True)


def test_more_cpu_ranks_than_cores_are_said_to_make_noise() -> None:
    told = "4 ranks share 2 cores: times are noise, and ratios vary between runs"
    crowded = comparison(ROWS[0], ranks=4, device="CPU", arch="cpu", cores=2)
    assert told in performance_text(crowded).splitlines()
    for calm in (replace(crowded, ranks=2), comparison(ROWS[0], ranks=4, cores=2), replace(crowded, about={})):
        assert "noise" not in performance_text(calm)


def test_the_markdown_has_every_peer_and_the_command() -> None:
    lines = performance_markdown(MADE).splitlines()
    assert lines[0].endswith("2 x NVIDIA H200, driver 580.1, torch 2.11. `workbench measure fused`")
    assert "| 1 | **10.00** | 9.80 to 10.20 | NCCL + norm | **0.500** | 20.00 |" in lines


def test_labels_of_others_cannot_become_markup() -> None:
    hostile = replace(ROWS[0], columns=tuple(replace(c, label="<img src=x>") for c in ROWS[0].columns))
    assert "<img" not in performance_figure(comparison(hostile)).to_json().replace("\\u003c", "<")


def test_curves_are_lines_by_name() -> None:
    figure = curves_figure({"a": {1.0: 2.0, 10.0: 20.0}, "b": {1.0: 3.0}}, title="t", x_title="MiB", y_title="µs")
    assert [(line.name, tuple(line.x), tuple(line.y)) for line in figure.data] == [
        ("a", (1.0, 10.0), (2.0, 20.0)),
        ("b", (1.0,), (3.0,)),
    ]
    assert (figure.layout.xaxis.type, figure.layout.yaxis.title.text) == ("log", "µs")
