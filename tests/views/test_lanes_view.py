"""The rendezvous picture: bars, signs, hover texts, its twin, its size, and hostile names."""

from __future__ import annotations

import json
from typing import Any

from tests.trace.made import START_NS, call, group, trace
from workbench.trace import CallSite, Lanes, rendezvous_lanes
from workbench.views import lanes_figure, lanes_text
from workbench.views.lanes import MAX_VISITS
from workbench.views.words import ranks_text, time_text

TP = group("tp", 0, 1, 2)


def drawn(lanes: Lanes) -> dict[str, Any]:
    return json.loads(lanes_figure(lanes).to_json())


def named(lanes: Lanes, name: str) -> list[dict[str, Any]]:
    return [t for t in drawn(lanes)["data"] if t.get("name") == name]


def healthy() -> Lanes:
    events = call(0, TP, 1, 10, 60) + call(1, TP, 1, 50, 62) + call(2, TP, 1, 30, 61)
    return rendezvous_lanes(trace(events, ranks=range(3)))


def hanging() -> Lanes:
    events = call(0, TP, 1, 10) + call(2, TP, 1, 30)
    return rendezvous_lanes(trace(events, ranks=range(3)), until_ns=START_NS + 510_000)


def test_a_bar_is_pale_until_the_last_arrival_and_full_from_then_on() -> None:
    inside, waits, _ = named(healthy(), "tp")
    assert (waits["base"], waits["x"], waits["y"]) == ([0.0, 20.0], [40.0, 20.0], [0, 2])
    assert (inside["base"], inside["x"], inside["y"]) == ([40.0, 40.0, 40.0], [10.0, 12.0, 11.0], [0, 1, 2])
    assert (inside["marker"]["color"], waits["marker"]["color"]) == ("#0072B2", "rgba(0,114,178,0.25)")
    assert drawn(healthy())["layout"]["xaxis"]["title"]["text"] == "time since the first event [µs]"


def test_the_diamond_sits_on_the_last_and_the_arrowheads_point_to_it() -> None:
    data = drawn(healthy())["data"]
    signs = {t["marker"]["symbol"]: (t["x"], t["y"]) for t in data if "symbol" in t.get("marker", {})}
    assert signs == {"diamond": ([40.0], [1]), "triangle-down": ([40.0], [0]), "triangle-up": ([40.0], [2])}


def test_a_missing_rank_has_an_outline_that_says_who_waits() -> None:
    (missing,) = named(hanging(), "never came")
    assert (missing["base"], missing["x"], missing["y"]) == ([0.0], [500.0], [1])
    assert missing["text"] == ["never came; ranks 0,2 waiting"]
    hatched = named(hanging(), "tp")[2]
    assert (hatched["base"], hatched["x"], hatched["y"]) == ([0.0, 20.0], [500.0, 480.0], [0, 2])
    assert hatched["marker"]["pattern"]["shape"] == "/"


def test_a_rank_that_others_await_while_it_is_inside_another_call_is_labelled_with_both() -> None:
    """Rank 1 does not come to tp, since it waits in cp for rank 3, which never came to anything."""
    cp = group("cp", 1, 3)
    events = call(0, TP, 1, 10) + call(2, TP, 1, 30) + call(1, cp, 1, 20)
    lanes = rendezvous_lanes(trace(events, ranks=range(4)), until_ns=START_NS + 510_000)
    names = [t.get("name") for t in drawn(lanes)["data"]]
    (missing,) = named(lanes, "never came")
    assert (missing["y"], missing["text"]) == ([3], ["never came; rank 1 waiting"])
    (awaited,) = named(lanes, "awaited in another call")
    assert awaited["y"] == [1]
    assert awaited["width"] > named(lanes, "cp")[2]["width"]
    assert names.index("awaited in another call") > max(n for n, name in enumerate(names) if name in ("tp", "cp"))
    (label,) = drawn(lanes)["layout"]["annotations"]
    assert (label["y"], label["text"]) == (1, "inside all_reduce; awaited by ranks 0,2 in all_reduce")
    assert "rank 1, which never came; rank 1 is inside all_reduce #1 on cp[1,3]" in lanes_text(lanes)


def test_a_kind_with_only_unfinished_calls_stands_in_the_legend() -> None:
    inside = named(hanging(), "tp")[0]
    assert inside["x"] == [None]  # plotly leaves a trace without any point out of the legend
    assert inside["marker"]["color"] == "#0072B2"
    assert "showlegend" not in inside


def test_a_line_of_a_cell_is_called_by_its_number_and_not_by_its_file() -> None:
    sites = {
        "step": "cell, in step, line 3",
        "<module>": "cell, line 3",
    }
    for function, told in sites.items():
        site = CallSite(function, "/tmp/ipykernel_77/1234567890.py", 3)
        events = call(0, TP, 1, 10, site=site) + call(1, TP, 1, 20, site=site)
        texts = drawn(rendezvous_lanes(trace(events, ranks=range(3))))["data"][-1]["customdata"]
        assert texts[0].endswith(f"<br>{told}")
        assert str(site) == told
        assert site.in_cell
    assert str(CallSite("decode", "model.py", 41)) == "decode (model.py:41)"


def test_hovering_tells_who_waited_for_whom_and_where() -> None:
    texts = drawn(healthy())["data"][-1]["customdata"]
    assert texts[0] == (
        "<b>rank 0</b>: all_reduce #1 on tp[0..2]<br>came at 0 µs, left at 50 µs<br>waited 40 µs for rank 1"
        "<br>decode (model.py:41)"
    )
    assert "<br>came last<br>" in texts[1]


def test_a_rank_without_record_is_dotted_and_a_failed_one_crossed() -> None:
    events = call(0, TP, 1, 10, 90, error="RuntimeError: closed") + call(1, TP, 1, 50)
    lanes = rendezvous_lanes(trace(events, ranks=(0, 1)))
    (unknown,) = named(lanes, "no record")
    assert (unknown["x"], unknown["y"], unknown["line"]["dash"]) == ([0.0, 80.0, None], [2, 2, None], "dot")
    (failed,) = named(lanes, "failed")
    assert (failed["x"], failed["y"]) == ([80.0], [0])
    assert "RuntimeError: closed" in drawn(lanes)["data"][-1]["customdata"][0]


def test_the_twin_tells_each_call_in_one_line() -> None:
    assert lanes_text(healthy()).splitlines() == [
        "3 ranks, 1 call, 52 µs",
        "     0 µs  all_reduce #1 on tp[0..2]: rank 0 waited 40 µs for rank 1",
    ]
    assert lanes_text(hanging()).splitlines() == [
        "3 ranks, 1 call, 500 µs; 1 still open",
        "     0 µs  all_reduce #1 on tp[0..2]: ranks 0,2 waited 500 µs for rank 1, which never came",
    ]


def test_the_twin_tells_failures_unknown_ranks_and_calls_that_all_entered() -> None:
    unknown = rendezvous_lanes(trace(call(0, TP, 1, 10) + call(1, TP, 1, 50, 90, error="E: x"), ranks=(0, 1)))
    assert lanes_text(unknown).splitlines()[1].endswith("rank 0 waited 80 µs; no record of rank 2; rank 1 failed: E: x")
    stalled = rendezvous_lanes(trace([e for r in range(3) for e in call(r, TP, 1, r)], ranks=range(3)))
    assert lanes_text(stalled).splitlines()[1].endswith("all came; ranks 0..2 still inside after 2 µs")
    even = rendezvous_lanes(trace([e for r in range(3) for e in call(r, TP, 1, 5, 9)], ranks=range(3)))
    assert lanes_text(even).splitlines()[1].endswith("nobody waited")


def test_long_traces_show_the_newest_calls_and_say_so() -> None:
    pair = group("tp", 0, 1)
    events = [e for n in range(1, 1001) for r in (0, 1) for e in call(r, pair, n, 10 * n + r, 10 * n + 5)]
    lanes = rendezvous_lanes(trace(events, ranks=(0, 1)))
    figure = lanes_figure(lanes)
    assert len(figure.to_json()) < 300_000
    assert figure.layout.title.text.startswith(f"2 ranks, the newest {MAX_VISITS // 2} of 1000 calls")
    assert len(lanes_text(lanes).splitlines()) == MAX_VISITS // 2 + 1


def test_equal_lanes_give_equal_pictures() -> None:
    assert lanes_figure(hanging()).to_json() == lanes_figure(hanging()).to_json()


def test_names_from_a_recorded_program_are_escaped() -> None:
    bad = group("<img src=x>", 0, 1)
    events = [e for r in (0, 1) for e in call(r, bad, 1, r, 9, op="<a href='javascript:1'>x</a>")]
    text = lanes_figure(rendezvous_lanes(trace(events, ranks=(0, 1)))).to_json()
    assert "<img" not in text
    assert "<a href" not in text
    assert "\\u003cimg" not in text


def test_nothing_to_draw_is_drawn() -> None:
    assert lanes_text(rendezvous_lanes([])) == "0 ranks, 0 calls, 0 µs"
    assert drawn(rendezvous_lanes([]))["layout"]["height"] > 100


def test_ranks_and_times_in_words() -> None:
    ranks = [(0, 1, 2, 3), (0, 8, 16), (5,), (0, 1), (3, 1, 2), tuple(n * n for n in range(10))]
    assert [ranks_text(r) for r in ranks] == [
        "0..3",
        "0..16 step 8",
        "5",
        "0,1",
        "3,1,2",
        "0,1,4,9,16,25,...,81 (10 ranks)",
    ]
    times = [0, 736, 35_000, 999_400, 1_250_000, 12e9]
    assert [time_text(t) for t in times] == ["0 µs", "0.736 µs", "35 µs", "999 µs", "1.25 ms", "12 s"]
