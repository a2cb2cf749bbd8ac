"""Pins what a notebook shows: figures with a text twin, tables that escape, the strip of ranks, lanes cut to size."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.views.test_lanes_view import hanging, healthy
from workbench.views import PLOTLY, kind_colour, rank_strip_figure, show_lanes, show_ranks, show_table


@dataclass(frozen=True)
class At:
    world_rank: int
    state: str
    last: str


def test_a_table_aligns_numbers_right_and_escapes_what_it_holds() -> None:
    shown = show_table(("who", "n"), [("<b>", 1), ("&", 23)])
    assert repr(shown) == "who   n\n<b>   1\n&    23"
    html = shown.data["text/html"]
    assert "<b>" not in html.replace("&lt;b&gt;", "")
    assert '<td style="text-align: right">23</td>' in html


def test_the_strip_names_every_state_in_words_and_draws_the_dead_in_vermilion() -> None:
    ranks = [At(1, "dead", "<x>"), At(0, "idle", "last call: a"), At(2, "running", "inside b"), At(3, "odd", "")]
    shown = show_ranks(ranks)
    assert repr(shown) == (
        "4 ranks: 1 idle, 1 dead, 1 running, 1 odd\n"
        "world rank 0  idle     last call: a\n"
        "world rank 1  dead     <x>\n"
        "world rank 2  running  inside b\n"
        "world rank 3  odd"
    )
    row = rank_strip_figure(ranks).data[0]
    assert list(row.z[0]) == [0, 3, 1, 2]
    assert row.colorscale[-1][1] == "#D55E00"
    assert row.customdata[0][1] == "dead; &lt;x&gt;"
    assert "dead" in row.text[0]
    assert len(str(shown.data[PLOTLY])) < 12_000


def test_the_newest_calls_alone_can_be_shown() -> None:
    (call,) = hanging().calls
    early = replace(call, sequence=7, visits=tuple(replace(v, arrive_ns=5, leave_ns=9) for v in call.visits))
    lanes = replace(hanging(), calls=(early, call), start_ns=5)
    assert "all_reduce #7" in repr(show_lanes(lanes))
    newest = repr(show_lanes(lanes, newest=1))
    assert "all_reduce #7" not in newest
    assert newest.splitlines()[1:] == repr(show_lanes(hanging())).splitlines()[1:]
    assert repr(show_lanes(lanes, newest=99)) == repr(show_lanes(lanes))


def test_the_newest_calls_fill_the_picture_whatever_the_record_holds_after_them() -> None:
    """Processes go on for 75 ms after their last call; while a rank is inside one, the end of the record counts."""
    whole = healthy()
    late = replace(whole, end_ns=whole.end_ns + 75_000_000)
    assert show_lanes(late, newest=1).data == show_lanes(whole, newest=1).data
    still = replace(hanging(), end_ns=hanging().end_ns + 75_000_000)
    assert repr(show_lanes(still, newest=1)).startswith("3 ranks, 1 call, 75.5 ms; 1 still open")


def test_where_no_plotly_is_drawn_the_text_says_how_to_get_the_picture() -> None:
    shown = show_lanes(hanging())
    told = shown._repr_mimebundle_()["text/plain"]
    assert told.startswith(repr(shown))
    assert told.endswith("`python -m workbench.notebooks --html FILE.ipynb` writes a page with the figures)")
    assert "--html" not in repr(shown)
    assert "--html" not in str(show_table(("a",), [(1,)])._repr_mimebundle_())


def test_a_group_has_the_colour_of_its_kind() -> None:
    assert kind_colour("attn_cp[0,2]") == kind_colour("attn_cp") == "#E69F00"
