"""How ranks end or stand still: threads, statuses after the last call, waits of C++, beginnings, tags that differ."""

from __future__ import annotations

from tests.diagnose.made import Made, group, site
from workbench.diagnose import Kind, diagnose

WORLD = group("world", 0, 1, 2)


def test_an_exception_that_ended_a_thread_comes_before_the_hang_it_causes() -> None:
    made = Made(3)
    for rank in (0, 2):
        made.begin(rank, "all_reduce", WORLD, site=site(9))
    made.instant(1, "exception", error="ValueError: bad sample", note="in a thread", site=site(7))
    made.begin(1, "barrier", WORLD, site=site(12))
    made.pause(31)
    first, then = diagnose(made.trace(), deadline_s=30.0, now_ns=made.now_ns)
    assert (first.kind, first.ranks) == (Kind.PEER_EXCEPTION, (1,))
    assert "ValueError: bad sample in main (train.py:7)" in first.message
    assert (then.kind, then.ranks) == (Kind.OP_MISMATCH, (1,))


def test_a_thread_that_failed_in_a_job_that_went_well_is_no_finding() -> None:
    made = Made(1)
    made.instant(0, "exception", error="OSError: no metrics today", note="in a thread")
    made.exit(0)
    assert diagnose(made.trace()) == ()


def test_a_status_after_the_groups_are_destroyed_is_the_programs_own() -> None:
    made = Made(2)
    pair = group("world", 0, 1)
    for rank in (0, 1):
        made.call(rank, "all_reduce", pair)
    made.call(0, "destroy_process_group", pair, note="default group")
    made.exit(0, status=3)
    assert diagnose(made.trace()) == ()
    made.call(1, "destroy_process_group", pair, note="default group")
    made.exit(1, status=-15)
    assert diagnose(made.trace()) == ()


def test_a_status_while_the_groups_stand_is_told() -> None:
    made = Made(2)
    pair = group("world", 0, 1)
    for rank in (0, 1):
        made.call(rank, "all_reduce", pair)
    made.exit(0)
    made.exit(1, status=3)
    assert [(f.kind, f.ranks) for f in diagnose(made.trace())] == [(Kind.PEER_DEAD, (1,))]


def test_a_bucket_that_c_plus_plus_waits_for_counts_as_a_wait() -> None:
    made = Made(3)
    for rank in (0, 2):
        made.begin(rank, "all_reduce", WORLD, note="async; below Python", site=site(20))
    made.pause(31)
    (finding,) = diagnose(made.trace(), deadline_s=30.0, now_ns=made.now_ns)
    assert (finding.kind, finding.ranks) == (Kind.RENDEZVOUS_PARTIAL, (1,))
    assert "train.py:20" in finding.message


def test_world_sizes_that_differ_are_told_and_not_the_wait_they_cause() -> None:
    made = Made(2)
    made.begin(0, "init_process_group", group("world", 0, 1), site=site(5))
    made.begin(1, "init_process_group", group("world", 0, 1, 2), site=site(5))
    made.pause(31)
    (finding,) = diagnose(made.trace(), deadline_s=30.0, now_ns=made.now_ns)
    assert (finding.kind, finding.ranks) == (Kind.GROUP_PLAN_MISMATCH, (0, 1))
    assert "2 (init_process_group in main (train.py:5)) on world rank 0, 3 (" in finding.message


def test_groups_of_local_synchronization_made_in_a_circle_are_an_order_swap() -> None:
    made = Made(3)
    pair, three = group("group", 0, 1, label="a" * 40), group("group", 0, 1, 2, label="b" * 40)
    made.begin(0, "new_group", pair, site=site(5))
    made.begin(1, "new_group", three, site=site(6))
    made.begin(2, "new_group", three, site=site(6))
    made.pause(31)
    findings = diagnose(made.trace(), deadline_s=30.0, now_ns=made.now_ns)
    assert (findings[0].kind, findings[0].ranks) == (Kind.ORDER_SWAP, (0, 1))


def test_a_member_that_makes_no_group_of_local_synchronization_is_told() -> None:
    made = Made(2)
    made.begin(0, "new_group", group("group", 0, 1, label="a" * 40), site=site(5))
    made.begin(1, "barrier", group("world", 0, 1), site=site(6))
    made.pause(31)
    findings = diagnose(made.trace(), deadline_s=30.0, now_ns=made.now_ns)
    assert 1 in findings[0].ranks
    assert "new_group in main (train.py:5)" in findings[0].message


def test_a_store_that_is_asked_now_and_then_is_no_finding() -> None:
    made = Made(1)
    made.call(0, "store_wait", error="DistStoreError: wait timeout after 200ms, keys: /ready", note="ready")
    made.call(0, "store_wait", note="ready")
    assert diagnose(made.trace()) == ()
    made.call(0, "store_wait", error="DistStoreError: wait timeout after 200ms, keys: /ready", note="ready")
    assert [f.kind for f in diagnose(made.trace())] == [Kind.STORE_TIMEOUT]
    made.exit(0)
    assert diagnose(made.trace()) == ()


def test_a_receive_that_fits_no_send_of_its_peer_is_told_on_both() -> None:
    made = Made(2)
    pair = group("world", 0, 1)
    made.call(0, "send", pair, peer_world_rank=1, site=site(8))
    made.begin(1, "recv", pair, peer_world_rank=0, site=site(9))
    made.pause(31)
    (finding,) = diagnose(made.trace(), deadline_s=30.0, now_ns=made.now_ns)
    assert (finding.kind, finding.ranks) == (Kind.STALLED, (0, 1))
    assert "world rank 1 waits in recv in main (train.py:9) for world rank 0" in finding.message
    assert "tag=" in finding.fix
    assert diagnose(made.trace(), deadline_s=60.0, now_ns=made.now_ns) == ()


def test_exceptions_that_differ_in_the_address_of_an_object_are_one() -> None:
    made = Made(2)
    for rank, address in enumerate(("0x7f01ab30", "0x7fe0cc70")):
        made.instant(rank, "exception", error=f"ValueError: Group <ProcessGroup object at {address}> is not registered")
        made.exit(rank, status=1)
    (finding,) = diagnose(made.trace())
    assert (finding.kind, finding.ranks) == (Kind.PEER_EXCEPTION, (0, 1))
    assert "0x7f01ab30" in finding.message
