"""Calls that some members never enter: whose fault, how sure, and when nothing may be said yet."""

from __future__ import annotations

import pytest

from tests.diagnose.made import START_NS, Made, group, site
from workbench.diagnose import Certainty, Finding, Kind, diagnose
from workbench.trace import Drops

TP = group("tp", 0, 1, 2)


def _waiting(made: Made, *ranks: int, op: str = "all_reduce", line: int = 50) -> None:
    for rank in ranks:
        made.begin(rank, op, TP, site=site(line))


def _all(made: Made, op: str = "all_reduce", line: int = 41) -> None:
    for rank in range(3):
        made.call(rank, op, TP, site=site(line))


def _said(finding: Finding) -> tuple[Kind, tuple[int, ...], Certainty]:
    return finding.kind, finding.ranks, finding.certainty


def test_a_later_call_that_a_rank_left_out_by_ending_is_missing() -> None:
    made = Made(3)
    _all(made)
    made.exit(1)
    _waiting(made, 0, 2)
    (finding,) = diagnose(made.trace())
    assert _said(finding) == (Kind.MISSING_CALL, (1,), Certainty.IS)
    assert "all_reduce in main (train.py:50), call #2 of tp[0,1,2]: world ranks 0,2 came" in finding.message
    assert "world rank 1 ended with status 0; its last call was all_reduce in main (train.py:41)" in finding.message


def test_the_first_call_and_every_exchange_between_hosts_is_a_rendezvous() -> None:
    first = Made(3)
    _waiting(first, 0, 2)
    first.exit(1)
    assert _said(diagnose(first.trace())[0]) == (Kind.RENDEZVOUS_PARTIAL, (1,), Certainty.IS)
    later = Made(3)
    _all(later)
    _waiting(later, 0, 2, op="all_gather_object")
    later.exit(1)
    assert _said(diagnose(later.trace())[0]) == (Kind.RENDEZVOUS_PARTIAL, (1,), Certainty.IS)


def test_a_rank_that_is_alive_and_in_no_call_may_yet_come() -> None:
    made = Made(3)
    _all(made)
    _waiting(made, 0, 2)
    assert _said(diagnose(made.trace())[0]) == (Kind.MISSING_CALL, (1,), Certainty.LIKELY)


@pytest.mark.parametrize(("waited_s", "told"), [(29.0, False), (31.0, True)])
def test_while_the_job_runs_nothing_is_said_before_the_deadline(waited_s: float, told: bool) -> None:
    made = Made(3)
    _all(made)
    _waiting(made, 0, 2)
    made.pause(waited_s)
    findings = diagnose(made.trace(), deadline_s=30.0, now_ns=made.now_ns)
    assert [f.kind for f in findings] == [Kind.MISSING_CALL] * told


def test_a_rank_without_a_file_is_likely_at_fault_and_never_certainly() -> None:
    made = Made(3)
    _all(made)
    _waiting(made, 0, 2)
    (finding,) = diagnose(made.trace(without=[1]))
    assert _said(finding) == (Kind.MISSING_CALL, (1,), Certainty.LIKELY)
    assert "nothing is known of world rank 1" in finding.message


def test_what_a_ring_has_lost_is_not_called_missing() -> None:
    made = Made(3, drops={1: Drops(total=2, by_group=((TP, 2),))})
    made.call(0, "all_reduce", TP)
    made.call(2, "all_reduce", TP)
    made.exit(0, 1, 2)
    assert diagnose(made.trace()) == ()


def test_of_a_group_only_the_first_absence_is_told() -> None:
    made = Made(3)
    _all(made)
    made.call(0, "all_reduce", TP, error="RuntimeError: Connection closed by peer")
    made.exit(1)
    _waiting(made, 2)
    made.begin(0, "barrier", TP)
    assert [_said(f) for f in diagnose(made.trace())] == [(Kind.MISSING_CALL, (1,), Certainty.IS)]


def test_the_exception_of_the_absent_rank_comes_first() -> None:
    made = Made(3)
    _waiting(made, 0, 2)
    made.instant(1, "exception", error="ValueError: no such file", site=site(44, "load"))
    made.exit(1, status=1)
    findings = diagnose(made.trace())
    assert [(f.kind, f.ranks) for f in findings] == [(Kind.PEER_EXCEPTION, (1,)), (Kind.RENDEZVOUS_PARTIAL, (1,))]
    assert findings[0].message == "world rank 1 raised ValueError: no such file in load (train.py:44)."
    assert findings[0].fix == "repair what this rank ran into; the other ranks waited for it"


def test_where_every_rank_raised_nobody_is_said_to_have_waited() -> None:
    made = Made(2)
    for rank in range(2):
        made.instant(rank, "exception", error=f"ValueError: no such file: shard-{rank}", site=site(44, "load"))
    made.exit(0, 1, status=1)
    assert {f.fix for f in diagnose(made.trace())} == {"repair what the ranks ran into; none was left to wait"}


def test_an_exception_that_the_program_caught_is_no_finding() -> None:
    made = Made(3)
    made.instant(1, "exception", error="KeyError: 'cache'", site=site(44, "load"))
    _all(made)
    made.exit(0, 1, 2)
    assert diagnose(made.trace()) == ()


def test_exceptions_of_calls_are_told_where_nothing_else_explains_them() -> None:
    made = Made(3)
    error = "RuntimeError: ncclInternalError"
    for rank in range(3):
        made.call(rank, "all_reduce", TP, error=error)
        made.instant(rank, "exception", error=error, site=site(41))
    made.exit(0, 1, 2, status=1)
    (finding,) = diagnose(made.trace())
    assert _said(finding) == (Kind.PEER_EXCEPTION, (0, 1, 2), Certainty.LIKELY)


def test_ranks_that_a_launcher_ended_after_a_failure_are_not_blamed() -> None:
    made = Made(3)
    _all(made)
    made.instant(0, "exception", error="ValueError: bad batch", site=site(44))
    made.exit(0, status=1)
    made.begin(2, "all_reduce", TP)
    made.exit(1, 2, status=-15)
    findings = diagnose(made.trace())
    assert [(f.kind, f.ranks) for f in findings] == [(Kind.PEER_EXCEPTION, (0,)), (Kind.MISSING_CALL, (0,))]


def test_a_rank_that_had_destroyed_its_groups_is_blamed_though_a_launcher_ended_it() -> None:
    """Ranks 0 and 2 wait for 1, which has left: its connections close, they fail, and the launcher ends the rest."""
    made = Made(3)
    _all(made)
    made.call(1, "destroy_process_group", TP)
    closed = "RuntimeError: Connection closed by peer [127.0.0.1]:5034"
    for rank in (0, 2):
        made.call(rank, "all_gather_object", TP, error=closed, site=site(50))
        made.instant(rank, "exception", error=closed, site=site(50))
        made.exit(rank, status=1)
    made.exit(1, status=-15)
    assert _said(diagnose(made.trace())[0]) == (Kind.RENDEZVOUS_PARTIAL, (1,), Certainty.IS)


def test_a_wait_that_ran_out_blames_whoever_was_waited_for() -> None:
    made = Made(3)
    _all(made)
    for rank in (0, 2):
        made.call(rank, "all_reduce", TP, error="RuntimeError: Timed out waiting 1800000ms for recv operation")
    made.exit(0, 2, status=1)
    made.exit(1, status=-15)
    assert _said(diagnose(made.trace())[0])[:2] == (Kind.MISSING_CALL, (1,))


def test_a_killed_rank_is_told_before_those_that_lost_it() -> None:
    made = Made(3)
    _all(made)
    made.exit(1, status=-9)
    made.call(0, "all_reduce", TP, error="RuntimeError: Connection reset by peer")
    made.exit(0, status=1)
    findings = diagnose(made.trace())
    assert [(f.kind, f.ranks) for f in findings] == [(Kind.PEER_DEAD, (1,)), (Kind.MISSING_CALL, (1, 2))]
    assert "SIGKILL (9)" in findings[0].message


def test_a_process_that_is_gone_without_a_word_is_dead() -> None:
    made = Made(3)
    _all(made)
    _waiting(made, 0, 2)
    made.pause(2)
    findings = diagnose(made.trace(), deadline_s=1.0, now_ns=made.now_ns, dead={1})
    assert [(f.kind, f.ranks) for f in findings] == [(Kind.PEER_DEAD, (1,)), (Kind.MISSING_CALL, (1,))]


@pytest.mark.parametrize("path", ["nccl", "custom.fused.push"])
def test_a_group_that_a_captured_graph_holds_is_not_destroyed_and_only_nccl_waits_for_graphs(path: str) -> None:
    made = Made(2)
    for rank in (0, 1):
        capture = made.begin(rank, "capture", site=site(70))
        made.call(rank, "all_reduce", group("world", 0, 1), capture=True, path=path, site=site(71))
        made.end(capture)
        made.begin(rank, "destroy_process_group", group("world", 0, 1), site=site(80))
    made.pause(30)
    found = diagnose(made.trace(), deadline_s=5.0, now_ns=made.now_ns)
    if path != "nccl":
        assert found == ()
        return
    (finding,) = found
    assert (finding.code, finding.kind, finding.ranks) == ("stalled.destroy", Kind.STALLED, (0, 1))
    assert "destroy_process_group in main (train.py:80)" in finding.message
    assert "all_reduce in main (train.py:71)" in finding.message
    assert "graph.reset()" in finding.fix


def test_all_inside_and_nothing_moves() -> None:
    made = Made(3)
    _waiting(made, 0, 1, 2)
    made.pause(31)
    (finding,) = diagnose(made.trace(), deadline_s=30.0, now_ns=made.now_ns)
    assert _said(finding) == (Kind.STALLED, (0, 1, 2), Certainty.IS)
    assert "for 31.0 s" in finding.message


def test_a_recv_without_its_send_names_the_sender() -> None:
    made = Made(2)
    world = group("world", 0, 1)
    made.call(0, "send", world, peer_world_rank=1)
    made.call(1, "recv", world, peer_world_rank=0)
    made.begin(1, "recv", world, peer_world_rank=0, site=site(60))
    made.exit(0)
    (finding,) = diagnose(made.trace())
    assert _said(finding) == (Kind.MISSING_CALL, (0,), Certainty.IS)
    assert "recv in main (train.py:60)" in finding.message


def test_an_asynchronous_call_that_is_waited_for_waits() -> None:
    made = Made(2)
    pair = group("tp", 0, 1)
    made.begin(0, "all_reduce", pair, note="async", site=site(60))
    made.exit(1)
    assert _said(diagnose(made.trace())[0])[:2] == (Kind.RENDEZVOUS_PARTIAL, (1,))
    made.begin(0, "wait", note="for all_reduce #1 on tp[0,1]")
    assert _said(diagnose(made.trace())[0]) == (Kind.RENDEZVOUS_PARTIAL, (1,), Certainty.IS)


def test_one_line_on_sibling_groups_is_one_finding() -> None:
    made = Made(4)
    for pair in (group("tp", 0, 1), group("tp", 2, 3, ordinal=1)):
        for rank in pair.world_ranks:
            made.call(rank, "all_reduce", pair, dtype="float16" if rank % 2 else "float32")
    (finding,) = diagnose(made.trace())
    assert (finding.kind, finding.ranks) == (Kind.DTYPE_MISMATCH, (0, 1, 2, 3))
    assert finding.message.endswith("Likewise on tp[2,3] by world ranks 2,3.")


def test_a_rank_that_never_makes_the_default_group_is_told() -> None:
    made, world = Made(3), group("world", 0, 1, 2)
    for rank in (0, 2):
        made.begin(rank, "init_process_group", world, site=site(5))
    made.pause(31)
    findings = diagnose(made.trace(), deadline_s=30.0, now_ns=made.now_ns)
    assert [_said(f) for f in findings] == [(Kind.RENDEZVOUS_PARTIAL, (1,), Certainty.LIKELY)]
    assert "init_process_group in main (train.py:5), the beginning of world[0,1,2]" in findings[0].message
    made.instant(1, "exception", error="FileNotFoundError: weights", site=site(3))
    made.exit(1, status=1)
    findings = diagnose(made.trace(), deadline_s=30.0, now_ns=made.now_ns)
    assert [f.kind for f in findings] == [Kind.PEER_EXCEPTION, Kind.RENDEZVOUS_PARTIAL]


def test_the_clock_of_a_made_trace_is_that_of_its_events() -> None:
    made = Made(1)
    made.exit(0)
    assert made.trace().events[-1].time_ns == made.now_ns == START_NS + 1000


@pytest.mark.parametrize("last_to_act", [0, 2, 3])
def test_who_stands_in_an_exchange_that_others_stay_away_from_is_not_at_fault_for_a_send(last_to_act: int) -> None:
    made = Made(4)
    world = group("world", 0, 1, 2, 3)
    steps = {
        0: lambda: made.begin(0, "broadcast_object_list", world, site=site(18)),
        2: lambda: made.begin(2, "recv", world, site=site(22), peer_world_rank=0),
        3: lambda: made.instant(3, "new_group"),
    }
    last = steps.pop(last_to_act)
    for step in (*steps.values(), last):
        step()
    cause, *symptoms = diagnose(made.trace())
    assert _said(cause) == (Kind.RENDEZVOUS_PARTIAL, (1, 2, 3), Certainty.LIKELY)
    assert [_said(s) for s in symptoms] == [(Kind.MISSING_CALL, (0,), Certainty.LIKELY)]
    assert [s.consequence for s in symptoms] == [True]


def test_a_gradient_sum_that_a_rank_never_comes_to_is_a_matter_of_batches() -> None:
    made = Made(2)
    pair = group("world", 0, 1)
    for rank in (0, 1):
        made.call(rank, "all_reduce", pair, note="async; below Python")
    made.begin(0, "all_reduce", pair, note="async; below Python", site=site(60))
    made.begin(0, "wait", note="for all_reduce #2 on world[0,1]")
    made.exit(1)
    (finding,) = diagnose(made.trace())
    assert (finding.kind, finding.ranks) == (Kind.MISSING_CALL, (1,))
    assert "DistributedDataParallel.join()" in finding.fix
