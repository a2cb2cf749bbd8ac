"""Ranks that wait only because others do are told as a consequence of the first cause, and not blamed.

Exact: of each finding its kind, ranks, certainty, and whether it follows from one above it.
"""

from __future__ import annotations

import pytest

from tests.diagnose.made import Made, group, site
from workbench.diagnose import Certainty, Finding, Kind, diagnose

WORLD = group("world", 0, 1, 2, 3)


def _said(finding: Finding) -> tuple[Kind, tuple[int, ...], str, bool]:
    return finding.kind, finding.ranks, finding.certainty.value, finding.consequence


def _stuck_pipeline() -> Made:
    """0 and 1 receive from each other before they send; 2 waits for 1, and 3 for 2."""
    made = Made(4)
    for rank, peer in ((0, 1), (1, 0), (2, 1), (3, 2)):
        made.begin(rank, "recv", WORLD, site=site(10 + rank), peer_world_rank=peer)
    made.pause(31)
    return made


def test_behind_a_circle_nobody_who_waits_for_it_is_blamed() -> None:
    made = _stuck_pipeline()
    findings = diagnose(made.trace(), deadline_s=30.0, now_ns=made.now_ns)
    assert _said(findings[0]) == (Kind.ORDER_SWAP, (0, 1), "likely", False)
    assert sorted({f.ranks for f in findings[1:]}) == [(0,), (1,), (2,)]
    for finding in findings[1:]:
        assert (finding.kind, finding.certainty, finding.consequence) == (Kind.MISSING_CALL, Certainty.LIKELY, True)
        assert finding.fix == "repair what stands above; this follows from it"
        assert f"by world rank {finding.ranks[0]} (follows from the above): " in str(finding)


def test_of_a_chain_only_its_end_is_at_fault() -> None:
    """3 waits for 2, 2 for 1, 1 for 0, which ended well."""
    made = Made(4)
    for rank in (1, 2, 3):
        made.begin(rank, "recv", WORLD, site=site(10 + rank), peer_world_rank=rank - 1)
    made.exit(0)
    made.pause(31)
    findings = diagnose(made.trace(), deadline_s=30.0, now_ns=made.now_ns)
    assert [_said(f) for f in findings] == [
        (Kind.MISSING_CALL, (0,), "is", False),
        (Kind.MISSING_CALL, (1,), "likely", True),
        (Kind.MISSING_CALL, (2,), "likely", True),
    ]


def test_a_second_circle_is_a_fault_of_its_own() -> None:
    """It hangs on neither the first one nor a rank that is late: nothing says that it follows from them."""
    made = Made(4)
    for rank, peer in ((0, 1), (1, 0), (2, 3), (3, 2)):
        made.begin(rank, "recv", WORLD, site=site(10 + rank), peer_world_rank=peer)
    made.pause(31)
    findings = diagnose(made.trace(), deadline_s=30.0, now_ns=made.now_ns)
    assert [f.consequence for f in findings if set(f.ranks) & {2, 3}] == [False, False]


LOST = "RuntimeError: [gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:1294{}"
TP = group("tp", 2, 3, ordinal=1)


def _two_roots() -> Made:
    """2 and 3 wait in a broadcast for each other; 0 and 1 for them in a sum over all."""
    made = Made(4)
    for rank in (2, 3):
        made.begin(rank, "broadcast", TP, site=site(10), root_world_rank=rank)
    for rank in (0, 1):
        made.begin(rank, "all_reduce", WORLD, site=site(20), note="default group")
    return made


def _uneven(status: int, error: str = "", line: int = 17) -> Made:
    """0 stands in a sum of gradients where 1 sums its loss, and dies; then 0 raises `error` at `line`."""
    made, pair = Made(2), group("world", 0, 1)
    made.begin(0, "all_reduce", pair, site=site(17), note="async; below Python", shape=(64,))
    made.begin(1, "all_reduce", pair, site=site(20), shape=(1,))
    if status:
        made.exit(1, status=status)
    if error:
        made.instant(0, "exception", error=error, site=site(line))
        made.exit(0, status=1)
    return made


def test_ranks_that_stand_in_a_faulty_call_are_not_blamed_for_being_absent_elsewhere() -> None:
    made = _two_roots()
    made.pause(31)
    assert [_said(f) for f in diagnose(made.trace(), deadline_s=30.0, now_ns=made.now_ns)] == [
        (Kind.ROOT_MISMATCH, (2, 3), "is", False),
        (Kind.RENDEZVOUS_PARTIAL, (2, 3), "likely", True),
    ]


def test_nor_is_a_rank_that_waits_for_them() -> None:
    """0 waits for 1 and 2; 1 for 2, which stands in the broadcast."""
    made, pair, three = Made(4), group("dp", 1, 2, ordinal=2), group("cp", 0, 1, 2, ordinal=3)
    for rank in (2, 3):
        made.begin(rank, "broadcast", TP, site=site(10), root_world_rank=rank)
    made.begin(1, "all_reduce", pair, site=site(20))
    made.begin(0, "all_reduce", three, site=site(30))
    assert [_said(f) for f in diagnose(made.trace())] == [
        (Kind.ROOT_MISMATCH, (2, 3), "is", False),
        (Kind.RENDEZVOUS_PARTIAL, (2,), "likely", True),
        (Kind.RENDEZVOUS_PARTIAL, (1, 2), "likely", True),
    ]


def test_nor_is_one_that_waits_for_a_rank_with_trouble_of_its_own() -> None:
    """0 waits for 1 and 2; 2 stands in the broadcast, and 1 waits for 4, which raised."""
    made, pair, three = Made(5), group("dp", 1, 4, ordinal=2), group("cp", 0, 1, 2, ordinal=3)
    for rank in (2, 3):
        made.begin(rank, "broadcast", TP, site=site(10), root_world_rank=rank)
    made.begin(1, "all_reduce", pair, site=site(20))
    made.instant(4, "exception", error="ValueError: bad sample", site=site(5))
    made.begin(0, "all_reduce", three, site=site(30))
    found = {(f.kind, f.ranks): f.consequence for f in diagnose(made.trace())}
    assert found == {
        (Kind.ROOT_MISMATCH, (2, 3)): False,
        (Kind.PEER_EXCEPTION, (4,)): False,
        (Kind.RENDEZVOUS_PARTIAL, (4,)): True,
        (Kind.RENDEZVOUS_PARTIAL, (1, 2)): True,
    }


@pytest.mark.parametrize("note", ["async; below Python", "async; on the GPU; below Python"])
def test_gradients_hold_a_rank_too_though_nobody_sees_it_wait(note: str) -> None:
    made, trio = Made(3), group("cp", 0, 1, 2, ordinal=1)
    pair = group("dp", 0, 1)
    made.begin(0, "all_reduce", pair, site=site(17), note=note, shape=(64,))
    made.begin(1, "all_reduce", pair, site=site(20), shape=(1,))
    made.begin(2, "barrier", trio, site=site(30))
    assert [_said(f) for f in diagnose(made.trace())] == [
        (Kind.MISSING_CALL, (1,), "likely", False),
        (Kind.RENDEZVOUS_PARTIAL, (0, 1), "likely", True),
    ]


def test_a_call_on_gpus_holds_its_ranks_until_the_device_is_past_it() -> None:
    made, pair, trio = Made(3), group("dp", 0, 1), group("cp", 0, 1, 2, ordinal=1)
    for rank in (0, 1):
        made.begin(rank, "all_reduce", pair, site=site(17), note="async; on the GPU", shape=(64 + rank,))
    made.begin(2, "barrier", trio, site=site(30))
    assert [_said(f)[::3] for f in diagnose(made.trace())] == [
        (Kind.SHAPE_MISMATCH, False),
        (Kind.RENDEZVOUS_PARTIAL, True),
    ]


def test_after_two_orders_later_calls_of_the_group_hold_its_ranks() -> None:
    made, pair, back = Made(3), group("dp", 0, 1), group("pp", 0, 2, ordinal=1)
    for rank in (0, 1):
        made.call(rank, "all_reduce", pair, site=site(10), shape=(8 - 2 * rank,))
    for rank in (0, 1):
        made.begin(rank, "all_reduce", pair, site=site(10), shape=(6 + 2 * rank,))
    made.begin(2, "barrier", back, site=site(30))
    assert [_said(f) for f in diagnose(made.trace())] == [
        (Kind.ORDER_SWAP, (0, 1), "is", False),
        (Kind.RENDEZVOUS_PARTIAL, (0,), "likely", True),
    ]


def test_one_rank_of_two_that_is_held_excuses_not_the_other() -> None:
    made, trio = Made(4), group("cp", 1, 2, 3, ordinal=2)
    made.begin(2, "broadcast", TP, site=site(10), root_world_rank=2)
    made.call(3, "broadcast", TP, site=site(10), root_world_rank=3)
    made.begin(1, "all_reduce", trio, site=site(20))
    made.exit(3)
    assert [_said(f)[1::2] for f in diagnose(made.trace())] == [((2, 3), False), ((2, 3), False)]


def test_a_rank_that_has_left_the_faulty_call_is_blamed_for_the_next() -> None:
    made = Made(4)
    for rank in (2, 3):
        made.call(rank, "broadcast", TP, site=site(10), root_world_rank=rank)
    for rank in (0, 1):
        made.begin(rank, "all_reduce", WORLD, site=site(20))
    made.begin(2, "barrier", TP, site=site(21))
    made.exit(3)
    found = {f.ranks: f.consequence for f in diagnose(made.trace()) if f.group == WORLD}
    assert found == {(2, 3): False}


def test_groups_after_the_first_that_differs_hold_ranks_through_no_other_fault() -> None:
    made, pairs = Made(3), [group("group", 0, 1, ordinal=1), group("group", 0, 2, ordinal=2)]
    trio = group("world", 0, 1, 2)
    for rank, plan in enumerate((pairs, pairs, pairs[::-1])):
        for pair in plan if rank else plan[:1]:
            made.call(rank, "new_group", pair, site=site(15))
    made.begin(0, "new_group", pairs[1], site=site(15))
    for rank in (1, 2):
        made.begin(rank, "barrier", trio, site=site(16))
    first, *others = diagnose(made.trace())
    assert (first.kind, first.ranks) == (Kind.GROUP_PLAN_MISMATCH, (2,))
    assert [_said(f) for f in others] == [(Kind.RENDEZVOUS_PARTIAL, (0,), "likely", True)]


def test_a_wait_for_a_rank_that_waits_for_a_key_follows_from_that() -> None:
    made, pair = Made(2), group("world", 0, 1)
    made.begin(1, "store_wait", note="weights/ready", site=site(18))
    made.begin(0, "barrier", pair, site=site(19))
    assert [_said(f)[::3] for f in diagnose(made.trace())] == [
        (Kind.STORE_TIMEOUT, False),
        (Kind.RENDEZVOUS_PARTIAL, True),
    ]


@pytest.mark.parametrize("status", [-6, -11, 1])
def test_who_ends_itself_in_a_faulty_call_does_so_over_that_call(status: int) -> None:
    assert [_said(f) for f in diagnose(_uneven(status).trace())] == [
        (Kind.MISSING_CALL, (1,), "likely", False),
        (Kind.PEER_DEAD, (1,), "likely", True),
    ]


def test_who_is_killed_in_a_faulty_call_was_killed_by_somebody() -> None:
    assert [_said(f)[::3] for f in diagnose(_uneven(-9).trace())] == [
        (Kind.MISSING_CALL, False),
        (Kind.PEER_DEAD, False),
    ]


@pytest.mark.parametrize(("status", "follows"), [(-6, True), (-11, False)])
def test_a_library_aborts_a_wait_for_a_rank_that_never_comes(status: int, follows: bool) -> None:
    made, pair = Made(2), group("world", 0, 1)
    made.begin(0, "all_reduce", pair, site=site(17))
    made.exit(1)
    made.exit(0, status=status)
    found = {f.kind: f.consequence for f in diagnose(made.trace())}
    assert found == {Kind.RENDEZVOUS_PARTIAL: False, Kind.PEER_DEAD: follows}


def test_a_death_elsewhere_than_in_the_faulty_call_is_a_cause() -> None:
    made, pair = Made(2), group("world", 0, 1)
    for rank in (0, 1):
        made.call(rank, "all_reduce", pair, dtype="float16" if rank else "float32")
    made.exit(1, status=-6)
    assert [_said(f)[::3] for f in diagnose(made.trace())] == [(Kind.DTYPE_MISMATCH, False), (Kind.PEER_DEAD, False)]


@pytest.mark.parametrize(
    ("error", "line", "follows"),
    [
        (LOST.format(1), 17, True),
        (LOST.format(1), 30, True),
        ("RuntimeError: op.preamble.length <= op.nbytes. 256 vs 4", 17, True),
        ("ValueError: loss is nan", 30, False),
    ],
    ids=["lost", "lost elsewhere", "of the call", "elsewhere"],
)
def test_what_comes_out_of_a_faulty_call_of_c_plus_plus_follows_from_it(error: str, line: int, follows: bool) -> None:
    assert [_said(f)[::3] for f in diagnose(_uneven(0, error, line).trace())] == [
        (Kind.MISSING_CALL, False),
        (Kind.PEER_EXCEPTION, follows),
    ]


@pytest.mark.parametrize(
    ("error", "follows"),
    [
        (LOST.format(1), True),
        ("RuntimeError: Timed out waiting 1800000ms for recv operation to complete", True),
        ("RuntimeError: CUDA error: device-side assert triggered", False),
    ],
)
def test_a_call_that_a_rank_never_came_to_raises_that_it_waited_and_no_more(error: str, follows: bool) -> None:
    made, pair = Made(2), group("world", 0, 1)
    made.begin(0, "all_reduce", pair, site=site(17), note="async; below Python")
    made.exit(1)
    made.instant(0, "exception", error=error, site=site(17))
    made.exit(0, status=1)
    assert [_said(f)[::3] for f in diagnose(made.trace())] == [
        (Kind.RENDEZVOUS_PARTIAL, False),
        (Kind.PEER_EXCEPTION, follows),
    ]


def test_an_exception_that_a_call_of_python_did_not_raise_is_a_cause() -> None:
    """From the line of an asynchronous call; and from a line of gradients after another call was made."""
    made, pair = Made(2), group("world", 0, 1)
    for rank in (0, 1):
        made.begin(rank, "all_reduce", pair, site=site(17), note="async", dtype="float16" if rank else "float32")
    made.instant(0, "exception", error="ValueError: bad", site=site(17))
    made.exit(0, status=1)
    assert [_said(f)[::3] for f in diagnose(made.trace())] == [
        (Kind.DTYPE_MISMATCH, False),
        (Kind.PEER_EXCEPTION, False),
    ]
    later = _uneven(0)
    later.call(0, "new_group", group("dp", 0, 1, ordinal=1), site=site(30))
    later.instant(0, "exception", error="ValueError: bad", site=site(17))
    later.exit(0, status=1)
    assert [f.consequence for f in diagnose(later.trace()) if f.kind is Kind.PEER_EXCEPTION] == [False]


def test_of_two_calls_that_raised_the_lost_connection_follows() -> None:
    made, pair = Made(2), group("world", 0, 1)
    for rank, error in enumerate((LOST.format(1), "RuntimeError: ncclInternalError")):
        made.call(rank, "all_reduce", pair, error=error)
        made.instant(rank, "exception", error=error, site=site(41))
        made.exit(rank, status=1)
    assert [_said(f)[1::2] for f in diagnose(made.trace())] == [((1,), False), ((0,), True)]


def test_what_a_lost_connection_leads_to_follows_from_it() -> None:
    made, trio = Made(3), group("world", 0, 1, 2)
    for rank in (1, 2):
        made.begin(rank, "barrier", trio, site=site(9))
    made.instant(0, "exception", error=LOST.format(1), site=site(17))
    made.exit(0, status=1)
    assert [_said(f) for f in diagnose(made.trace())] == [
        (Kind.PEER_EXCEPTION, (0,), "is", False),
        (Kind.RENDEZVOUS_PARTIAL, (0,), "likely", True),
    ]


def test_a_lost_connection_with_nothing_else_is_the_cause() -> None:
    made = Made(2)
    for rank in (0, 1):
        made.instant(rank, "exception", error=LOST.format(rank), site=site(17))
        made.exit(rank, status=1)
    assert [_said(f) for f in diagnose(made.trace())] == [(Kind.PEER_EXCEPTION, (0, 1), "is", False)]
