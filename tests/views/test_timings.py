"""Pins the picture of timings: a panel a token count, the fused path in the kind's colour, whiskers to the extremes."""

from __future__ import annotations

from dataclasses import replace

from workbench.trace import Sample
from workbench.views import kind_colour, timings_figure, timings_text


def _sample(kind: str, variant: str, tokens: int, us: float) -> Sample:
    return Sample(
        kind=kind, variant=variant, tokens=tokens, median_us=us, best_us=us / 2, worst_us=us * 3, rounds=5, calls=20
    )


SAMPLES = [_sample(k, v, t, u) for k in ("tp", "<b>") for t in (1, 8) for v, u in (("fused", 10.0), ("unfused", 90.0))]


def test_bars_say_the_samples() -> None:
    figure = timings_figure(SAMPLES)
    fused, unfused = ("fused, in the colour of its kind", (10.0, 10.0)), ("unfused", (90.0, 90.0))
    assert [(b.name, tuple(b.y)) for b in figure.data] == [fused, unfused] * 2
    assert [b.showlegend for b in figure.data] == [True, True, False, False]
    assert figure.data[0].marker.color[0] == kind_colour("tp")
    assert tuple(figure.data[0].error_y.array) == (20.0, 20.0)
    assert tuple(figure.data[0].error_y.arrayminus) == (5.0, 5.0)
    assert "<b>" not in figure.to_json().replace("<br>", "")


def test_steps_are_drawn_in_a_pale_tone_of_the_kind_between_fused_and_grey() -> None:
    """The blue of tp is 0072B2."""
    figure = timings_figure([_sample("tp", v, 1, 10.0) for v in ("fused", "steps", "unfused")])
    assert [b.marker.color[0] for b in figure.data] == ["#0072B2", "#8cc0dc", "#A0A4AB"]


def test_the_text_twin_has_a_line_a_sample() -> None:
    lines = timings_text(SAMPLES).splitlines()
    assert len(lines) == 1 + len(SAMPLES)
    assert lines[1].split() == ["tp", "fused", "1", "10.0", "5.0", "30.0"]


def test_a_sample_survives_json() -> None:
    assert Sample.from_json(SAMPLES[0].to_json()) == SAMPLES[0]


def test_a_group_of_many_members_goes_by_its_ends_under_its_bar() -> None:
    long = "tp[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15]"
    figure = timings_figure([_sample(kind, "fused", 1, 10.0) for kind in ("attention_tp[12,13,14,15]", long)])
    assert list(figure.data[0].x) == ["attention_tp[12,13,14,15]", "tp[0,1,..15]"]
    assert long in figure.data[0].hovertext[1]


def test_bars_of_like_lengths_start_at_zero_and_of_unlike_ones_stand_on_a_logarithmic_axis() -> None:
    steady = replace(_sample("tp[0,1]", "fused", 1, 300.0), best_us=280.0, worst_us=400.0)
    near, far = timings_figure([steady]), timings_figure([steady, replace(steady, worst_us=3000.0)])
    assert (near.layout.yaxis.type, near.layout.yaxis.rangemode) == ("linear", "tozero")
    assert (far.layout.yaxis.type, far.layout.yaxis.dtick) == ("log", "D2")
