"""What is recorded of a program's own calls: names, groups, roots, peers, reduce ops, sites, remarks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.observe.traced import begins, record, torchrun
from workbench.trace import Event, Phase, Trace, pair_calls


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    found, _ = record(tmp_path_factory.mktemp("calls"), torchrun("calls.py"))
    return found


def told(event: Event) -> tuple[object, ...]:
    group = None if event.group is None else event.group.world_ranks
    return (event.op, group, event.note)


def test_every_call_stands_under_its_own_name_on_its_group(trace: Trace) -> None:
    calls = [told(e) for e in begins(trace, 0) if e.op != "store_wait"]
    assert calls == [
        ("init_process_group", (0, 1), "timeout 60 s; store of the launcher, attempt 0"),
        ("new_group", (0, 1), "timeout 50 s; asked for in the order [1, 0]"),
        ("new_group", (1,), "no timeout given"),
        ("all_reduce", (0, 1), "default group"),
        ("all_reduce", (0, 1), ""),
        ("broadcast", (0, 1), ""),
        ("broadcast", (0, 1), ""),
        ("broadcast_object_list", (0, 1), ""),
        ("broadcast", (0, 1), "inside broadcast_object_list"),
        ("broadcast", (0, 1), "inside broadcast_object_list"),
        ("all_reduce", (0, 1), "async"),
        ("wait", None, "for all_reduce #8 on group[0,1]"),
        ("send", (0, 1), "default group"),
        ("send", (0, 1), "async"),
        ("recv", (0, 1), "async"),
        ("wait", None, "for send #2 on world[0,1]"),
        ("wait", None, "for recv #1 on world[0,1]"),
        ("all_gather", (0, 1), ""),
        ("all_reduce", (1,), "non-member"),
        ("all_gather_into_tensor", (0, 1), ""),
        ("reduce_scatter_tensor", (0, 1), ""),
        ("barrier", (0, 1), "default group"),
        ("destroy_process_group", (0, 1), "default group"),
    ]


def test_every_call_of_a_program_that_ends_has_an_end(trace: Trace) -> None:
    assert [str(c.event) for c in pair_calls(trace.events) if c.end is None] == []


def test_groups_carry_torchs_name_and_count_from_the_default_group_on(trace: Trace) -> None:
    made = [e.group for e in begins(trace, 1) if e.op in ("init_process_group", "new_group")]
    assert [(g.key.kind, g.world_ranks, g.label, g.ordinal) for g in made if g] == [
        ("world", (0, 1), "0", 0),
        ("group", (0, 1), "1", 1),
        ("group", (1,), "2", 2),
    ]


def test_the_root_is_recorded_in_both_numberings_however_it_was_given(trace: Trace) -> None:
    roots = [(e.root_group_rank, e.root_world_rank) for e in begins(trace, 0) if e.op == "broadcast" and not e.note]
    assert roots == [(1, 1), (0, 0)]


def test_what_a_tensor_looks_like_and_how_it_is_reduced(trace: Trace) -> None:
    reduces = [e for e in begins(trace, 0) if e.op == "all_reduce" and e.note in ("", "default group")]
    assert [(e.shape, e.dtype, e.stride_class, e.reduce_op, e.path) for e in reduces] == [
        ((2, 3), "float32", "contiguous", "sum", "gloo"),
        ((2, 3), "float32", "contiguous", "max", "gloo"),
    ]


def test_a_peer_is_a_world_rank_and_its_calls_are_counted_apart(trace: Trace) -> None:
    sends = [(e.op, e.peer_world_rank, e.sequence) for e in begins(trace, 0) if e.op in ("send", "recv")]
    assert sends == [("send", 1, 1), ("send", 1, 2), ("recv", 1, 1)]


def test_the_site_is_the_programs_line(trace: Trace) -> None:
    source = Path(__file__).parent.joinpath("programs", "calls.py").read_text().splitlines()
    for event in begins(trace, 0):
        assert event.site is not None
        assert event.site.function == "main"
        assert "dist." in source[event.site.line - 1] or "wait()" in source[event.site.line - 1], event.site


def test_a_rank_that_ends_says_how(trace: Trace) -> None:
    exits = [(e.world_rank, e.phase, e.note) for e in trace.events if e.op == "exit"]
    assert sorted(exits) == [(0, Phase.INSTANT, "status=0"), (1, Phase.INSTANT, "status=0")]
