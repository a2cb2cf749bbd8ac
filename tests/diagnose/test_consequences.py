"""Ranks that wait only because others do are told as a consequence of the first cause, and not blamed.

Exact: of each finding its kind, ranks, certainty, and whether it follows from one above it.
"""

from __future__ import annotations

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
    assert _said(findings[0]) == (Kind.ORDER_SWAP, (0, 1), "is", False)
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
