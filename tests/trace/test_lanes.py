"""Who waited for whom. Pinned: arrivals, the last one, missing versus unknown members, and groups that look alike."""

from __future__ import annotations

from tests.trace.made import START_NS, call, group, trace
from workbench.trace import Drops, Presence, rendezvous_lanes

TP = group("tp", 4, 6, 5)


def test_the_last_arrival_is_who_the_others_waited_for() -> None:
    events = call(4, TP, 1, 10, 52) + call(6, TP, 1, 50, 53) + call(5, TP, 1, 30, 52)
    lanes = rendezvous_lanes(trace(events, ranks=(4, 5, 6)))
    (one,) = lanes.calls
    assert (str(one), one.waited_for, one.missing, one.waiting) == ("all_reduce #1 on tp[4,6,5]", (6,), (), ())
    assert [(v.world_rank, v.presence, v.waited_ns) for v in one.visits] == [
        (4, Presence.LEFT, 40_000),
        (6, Presence.LEFT, 0),
        (5, Presence.LEFT, 20_000),
    ]
    assert one.visits[0].arrive_ns == START_NS + 10_000
    assert (lanes.start_ns - START_NS, lanes.end_ns - START_NS) == (10_000, 53_000)
    assert lanes.world_ranks == (4, 5, 6)
    assert lanes.stuck == ()


def test_a_member_that_never_came_is_missing_and_waits_last_until_the_trace_was_read() -> None:
    events = call(4, TP, 1, 10) + call(6, TP, 1, 50)
    lanes = rendezvous_lanes(trace(events, ranks=(4, 5, 6)), until_ns=START_NS + 1_000_000)
    (one,) = lanes.stuck
    assert (one.missing, one.unknown, one.waiting, one.waited_for) == ((5,), (), (4, 6), (5,))
    assert [(v.presence, v.waited_ns) for v in one.visits] == [
        (Presence.WAITING, 990_000),
        (Presence.WAITING, 950_000),
        (Presence.MISSING, 0),
    ]
    assert one.waited_ns == 990_000


def test_a_rank_without_a_file_is_unknown_and_not_missing() -> None:
    events = call(4, TP, 1, 10) + call(6, TP, 1, 50)
    (one,) = rendezvous_lanes(trace(events, ranks=(4, 6))).calls
    assert (one.missing, one.unknown, one.waited_for) == ((), (5,), (5,))


def test_a_call_that_a_ring_may_have_dropped_is_unknown_and_a_later_one_missing() -> None:
    kept = call(5, TP, 3, 70, 72)
    others = [e for r in (4, 6) for n in (2, 3, 4) for e in call(r, TP, n, 10 * n, 10 * n + 2)]
    lost = {5: Drops(total=4, by_group=((TP, 4),))}
    calls = rendezvous_lanes(trace(kept + others, ranks=(4, 5, 6), drops=lost)).calls
    assert [(c.sequence, c.missing, c.unknown) for c in calls] == [(2, (), (5,)), (3, (), ()), (4, (5,), ())]


def test_events_lost_on_another_group_do_not_cast_doubt_on_this_one() -> None:
    events = call(4, TP, 1, 10) + call(6, TP, 1, 50)
    lost = {5: Drops(total=4, by_group=((group("ep", 5, 9), 4),))}
    assert rendezvous_lanes(trace(events, ranks=(4, 5, 6), drops=lost)).calls[0].missing == (5,)


def test_a_damaged_record_may_have_been_the_call() -> None:
    events = call(4, TP, 1, 10) + call(6, TP, 1, 50)
    (one,) = rendezvous_lanes(trace(events, ranks=(4, 5, 6), drops={5: Drops(damaged=1)})).calls
    assert (one.missing, one.unknown) == ((), (5,))


def test_a_call_that_raised_is_failed_and_keeps_its_text() -> None:
    events = call(4, TP, 1, 10, 90, error="RuntimeError: connection closed") + call(6, TP, 1, 50)
    (one,) = rendezvous_lanes(trace(events, ranks=(4, 5, 6))).calls
    assert (one.visits[0].presence, one.visits[0].error) == (Presence.FAILED, "RuntimeError: connection closed")
    assert one.visits[0].waited_ns == 80_000


def test_groups_of_equal_ranks_are_told_apart_by_kind_generation_and_place() -> None:
    pairs = [group("tp", 0, 1), group("attn", 0, 1), group("tp", 0, 1, generation=1), group("tp", 0, 1, ordinal=7)]
    events = [e for n, g in enumerate(pairs) for r in (0, 1) for e in call(r, g, 1, 10 * n + r, 10 * n + 5)]
    calls = rendezvous_lanes(trace(events, ranks=(0, 1))).calls
    assert [len(c.visits) for c in calls] == [2, 2, 2, 2]
    assert [c.missing for c in calls] == [(), (), (), ()]


def test_an_ordinal_that_differs_between_ranks_does_not_tear_a_call_apart() -> None:
    events = call(0, group("tp", 0, 1, ordinal=3), 1, 0, 9) + call(1, group("tp", 0, 1, ordinal=4), 1, 5, 9)
    (one,) = rendezvous_lanes(trace(events, ranks=(0, 1))).calls
    assert one.waited_for == (1,)


def test_a_caller_outside_the_group_is_shown_behind_the_members() -> None:
    events = call(4, TP, 1, 10) + call(0, TP, 1, 20)
    (one,) = rendezvous_lanes(trace(events, ranks=(0, 4, 5, 6))).calls
    assert [(v.world_rank, v.presence.value) for v in one.visits] == [
        (4, "waiting"),
        (6, "missing"),
        (5, "missing"),
        (0, "waiting"),
    ]


def test_point_to_point_and_groupless_events_are_left_out() -> None:
    send = call(0, group("pp", 0, 1), 1, 0, 5, op="send", peer_world_rank=1)
    lanes = rendezvous_lanes(trace(send, ranks=(0, 1)))
    assert (lanes.calls, lanes.world_ranks) == ((), (0, 1))


def test_bare_events_are_enough() -> None:
    events = call(4, TP, 1, 10, 52) + call(6, TP, 1, 50, 53) + call(5, group("ep", 5), 1, 1, 2)
    calls = rendezvous_lanes(events).calls
    assert [(str(c), c.missing, c.waited_for) for c in calls] == [
        ("all_reduce #1 on ep[5]", (), ()),
        ("all_reduce #1 on tp[4,6,5]", (5,), (5,)),
    ]


def test_a_begin_that_was_dropped_leaves_an_end_without_arrival() -> None:
    events = call(4, TP, 1, None, 52) + call(6, TP, 1, 50, 53) + call(5, TP, 1, 51, 53)
    (one,) = rendezvous_lanes(trace(events, ranks=(4, 5, 6))).calls
    assert (one.visits[0].arrive_ns, one.visits[0].leave_ns, one.visits[0].waited_ns) == (None, START_NS + 52_000, 0)


def test_nothing_recorded_gives_empty_lanes() -> None:
    lanes = rendezvous_lanes([])
    assert (lanes.calls, lanes.world_ranks, lanes.stuck) == ((), (), ())
