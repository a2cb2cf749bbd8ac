"""Rules for groups, stores, captures and workspaces, on made traces: kinds, ranks and words are exact."""

from __future__ import annotations

import json

import pytest

from tests.diagnose.made import Made, group, site
from workbench.diagnose import Certainty, Kind, diagnose

PAIR = group("tp", 0, 1, ordinal=1, label="1")


def _kinds(made: Made, **arguments: object) -> list[tuple[Kind, tuple[int, ...]]]:
    return [(f.kind, f.ranks) for f in diagnose(made.trace(), **arguments)]


def _capture(made: Made, rank: int, *calls: str, error: str = "") -> None:
    capture = made.begin(rank, "capture", site=site(70, "record"))
    for op in calls:
        made.call(rank, op, PAIR, capture=op == "all_reduce")
    made.end(capture, error)


@pytest.mark.parametrize("op", ["workspace", "symm_mem_rendezvous", "all_gather_object", "barrier", "new_group"])
def test_what_waits_on_the_host_inside_a_capture_is_told(op: str) -> None:
    made = Made(2)
    _capture(made, 0, "all_reduce", op)
    _capture(made, 1, "all_reduce", op)
    made.exit(0, 1)
    (finding,) = diagnose(made.trace())
    assert (finding.kind, finding.ranks) == (Kind.CAPTURE_COLLECTIVE, (0, 1))
    assert f"{op} in main (train.py:41) was called by world ranks 0,1 inside a capture" in finding.message


def test_captures_with_different_numbers_of_calls_are_told_with_both() -> None:
    made = Made(2)
    _capture(made, 0, "all_reduce", "all_reduce", "all_reduce")
    _capture(made, 1, "all_reduce", "all_reduce")
    finding = diagnose(made.trace())[0]
    assert (finding.kind, finding.ranks) == (Kind.CAPTURE_COUNT_MISMATCH, (0, 1))
    assert "3 calls on world rank 0, 2 calls on world rank 1" in finding.message


def test_a_call_that_one_rank_records_and_the_other_runs_is_told() -> None:
    made = Made(2)
    _capture(made, 0, "all_reduce")
    made.begin(1, "all_reduce", PAIR)
    finding = diagnose(made.trace())[0]
    assert finding.kind is Kind.CAPTURE_COUNT_MISMATCH
    assert "recorded on world rank 0, run on world rank 1" in finding.message


def test_a_workspace_made_again_under_a_captured_graph_has_likely_moved() -> None:
    made = Made(2)
    for rank in (0, 1):
        made.call(rank, "workspace", PAIR, note="create(1024)")
        _capture(made, rank, "all_reduce")
        made.call(rank, "workspace", PAIR, note="create(4096)")
    made.exit(0, 1)
    (finding,) = diagnose(made.trace())
    assert (finding.kind, finding.ranks, finding.certainty) == (Kind.WORKSPACE_MOVED, (0, 1), Certainty.LIKELY)


def test_a_workspace_grown_before_the_capture_is_fine() -> None:
    made = Made(2)
    for rank in (0, 1):
        made.call(rank, "workspace", PAIR, note="create(1024)")
        made.call(rank, "workspace", PAIR, note="create(4096)")
        _capture(made, rank, "all_reduce")
    made.exit(0, 1)
    assert diagnose(made.trace()) == ()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("RuntimeError: cuMemImportFromShareableHandle failed", Kind.HANDLE_FAILURE),
        ("ValueError: buffer size 8192 exceeds the workspace", Kind.WORKSPACE_OVERFLOW),
        ("RuntimeError: something else", Kind.HANDLE_FAILURE),
    ],
)
def test_a_rendezvous_of_memory_that_fails_names_the_ranks_it_failed_on(error: str, kind: Kind) -> None:
    made = Made(2)
    made.call(0, "symm_mem_rendezvous", PAIR)
    made.call(1, "symm_mem_rendezvous", PAIR, error=error)
    made.instant(1, "exception", error=error, site=site(41))
    made.exit(1, status=1)
    finding = diagnose(made.trace())[0]
    assert (finding.kind, finding.ranks) == (kind, (1,))
    assert error in finding.message


def test_members_on_different_paths_are_told() -> None:
    made = Made(2)
    made.call(0, "all_reduce", PAIR, path="custom")
    made.call(1, "all_reduce", PAIR, path="nccl")
    (finding,) = diagnose(made.trace())
    assert finding.kind is Kind.PATH_DIVERGENCE
    assert "custom on world rank 0, nccl on world rank 1" in finding.message


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("PartialError: this Partial was reduced over tp already; a second reduce would double it", Kind.DOUBLE_REDUCE),
        ("PartialError: add on a Partial that still owes a sum over tp; reduce it first", Kind.MISSING_REDUCE),
        ("CapacityError: tp[0,1]: 513 tokens asked, prepared for at most 512", Kind.WORKSPACE_OVERFLOW),
        ("CaptureError: prepare on world rank 1 while a capture is on", Kind.CAPTURE_COLLECTIVE),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/wb-1'", Kind.ENVIRONMENT),
        ("ZeroDivisionError: division by zero", Kind.PEER_EXCEPTION),
    ],
)
def test_what_an_exception_says_decides_the_kind(error: str, kind: Kind) -> None:
    made = Made(2)
    made.instant(1, "exception", error=error, site=site(90, "step"))
    made.exit(1, status=1)
    (finding,) = diagnose(made.trace())
    assert (finding.kind, finding.ranks) == (kind, (1,))
    assert f"world rank 1 raised {error} in step (train.py:90)" in finding.message


def test_a_store_used_again_is_told_also_when_all_went_well() -> None:
    world = [group("world", 0, 1, label="0", generation=g) for g in range(3)]
    made = Made(2)
    for rank in (0, 1):
        made.call(rank, "init_process_group", world[0], note="no timeout given; store 1", site=site(10))
        made.call(rank, "init_process_group", world[1], note="no timeout given; store 1 under b", site=site(11))
        made.call(rank, "init_process_group", world[2], note="timeout 5 s; store 1", site=site(12))
    made.exit(0, 1)
    (finding,) = diagnose(made.trace())
    assert (finding.kind, finding.ranks) == (Kind.STALE_STORE, (0, 1))
    assert "init_process_group in main (train.py:12)" in finding.message


def test_keys_of_one_exchange_that_differ_in_one_number_are_a_drift_of_the_minority() -> None:
    made = Made(3)
    for rank, number in enumerate((4, 4, 3)):
        keys = ", ".join(f"exchange/{number}/{m}" for m in range(3))
        made.call(rank, "store_wait", note=keys, error="DistStoreError: wait timeout after 1000ms, keys: /exchange")
    finding = diagnose(made.trace())[0]
    assert (finding.kind, finding.ranks) == (Kind.ORDINAL_DRIFT, (2,))


def test_a_rank_that_never_makes_a_group_is_told_once_it_has_gone_another_way() -> None:
    world = group("world", 0, 1, 2, label="0")
    made = Made(3)
    for rank in range(3):
        made.call(rank, "init_process_group", world)
    for rank in (0, 1):
        made.begin(rank, "new_group", PAIR)
    made.pause(5)
    assert _kinds(made, deadline_s=10.0, now_ns=made.now_ns) == []
    assert _kinds(made, deadline_s=1.0, now_ns=made.now_ns) == [(Kind.RENDEZVOUS_PARTIAL, (2,))]
    made.begin(2, "barrier", world)
    made.pause(5)
    assert _kinds(made, deadline_s=1.0, now_ns=made.now_ns)[0] == (Kind.GROUP_PLAN_MISMATCH, (2,))


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        (("", ""), "Torch returned at once and left the tensor as it was."),
        (
            ("ValueError: Invalid process group specified",) * 2,
            "World rank 1 raised ValueError: Invalid process group specified.",
        ),
        (
            ("", "ValueError: no"),
            "World rank 1 raised ValueError: no. Torch returned at once and left the tensor as it was.",
        ),
    ],
)
def test_what_a_call_of_a_non_member_did_is_told_as_it_was(errors: tuple[str, str], told: str) -> None:
    made = Made(2)
    for error in errors:
        made.call(1, "send", group("group", 0), error=error, note="non-member")
    made.exit(0, 1)
    (finding,) = diagnose(made.trace())
    assert finding.kind is Kind.NON_MEMBER_CALL
    assert finding.message.endswith(f"which is no member of group[0]. {told}")


def test_without_group_is_wrong_where_no_declared_group_has_all_ranks() -> None:
    def told(op: str, **groups: list[list[int]]) -> list[tuple[Kind, Certainty]]:
        world = group("world", 0, 1)
        made = Made(2, declared=(json.dumps({"groups": groups}),))
        for rank in (0, 1):
            made.call(rank, op, world, note="default group")
            made.call(rank, "barrier", world, note="default group")
        return [(f.kind, f.certainty) for f in diagnose(made.trace())]

    apart, together = [[0], [1]], [[0, 1]]
    assert told("all_reduce", dp=apart) == [(Kind.WRONG_GROUP, Certainty.IS)]
    assert told("all_reduce", dp=apart, world=together) == []
    assert told("broadcast_object_list", dp=apart, world=together) == [(Kind.WRONG_GROUP, Certainty.LIKELY)]
    assert told("broadcast_object_list", dp=apart, tp=together, world=together) == []
    assert told("broadcast_object_list", world=together) == []


def test_an_empty_trace_and_texts_that_are_no_map_are_no_finding() -> None:
    made = Made(2, declared=("not json", "[]", '{"groups": 3}'))
    assert _kinds(made) == []
