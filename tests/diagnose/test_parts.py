"""All-to-alls whose members disagree on what one sends to another. Exact: kind, ranks, and the pair as it is told."""

from __future__ import annotations

from tests.diagnose.made import Made, group, site
from workbench.diagnose import Certainty, Finding, Kind, diagnose

EP = group("ep", 0, 1, 2)


def _found(*notes: str) -> tuple[Finding, ...]:
    """Three ranks exchange rows by these notes, after a call in which they agreed."""
    made = Made(3)
    for note in ("sends 4x3; takes 4x3", None):
        for rank in range(3):
            shape = {"shape": (3 + rank, 4), "dtype": "bfloat16", "site": site(30, "dispatch")}
            made.call(rank, "all_to_all_single", EP, note=note or notes[rank], **shape)
    made.exit(0, 1, 2)
    return diagnose(made.trace())


def test_the_pair_that_disagrees_is_named_with_both_numbers() -> None:
    (finding,) = _found("sends 8,8,24; takes 8,8,16", "sends 8,16,16; takes 8,16,16", "sends 16,16,8; takes 32,16,8")
    assert (finding.kind, finding.ranks, finding.certainty) == (Kind.SHAPE_MISMATCH, (0, 2), Certainty.IS)
    assert finding.message == (
        "all_to_all_single in dispatch (train.py:30), call #2 of ep[0,1,2]: the members disagree on how many elements "
        "they exchange: world rank 0 sends 24 to 2, which takes 32 from it. Nothing was raised."
    )
    assert len(finding.evidence) == 2


def test_the_one_rank_on_every_such_pair_is_at_fault_alone() -> None:
    (finding,) = _found("sends 8,9,8; takes 8x3", "sends 8x3; takes 8x3", "sends 8,9,8; takes 8x3")
    assert finding.ranks == (1,)
    assert "world rank 0 sends 9 to 1, which takes 8 from it; world rank 2 sends 9 to 1" in finding.message


def test_uneven_parts_that_agree_are_no_finding() -> None:
    assert _found("sends 8,0,24; takes 8,3,16", "sends 3,16,16; takes 0,16,5", "sends 16,5,8; takes 24,16,8") == ()


def test_members_whose_parts_are_not_known_are_not_compared() -> None:
    assert _found("sends 8,0,24; takes 8,3,16", "", "sends 16,5,8; takes 24,1,8") == ()
    assert _found("sends 8,0; takes 8,3", "sends 9x3; takes 9x3", "") == ()


def test_of_an_exchange_that_still_hangs_nobody_says_that_nothing_was_raised() -> None:
    made, pair = Made(2), group("ep", 0, 1)
    for rank, note in enumerate(("sends 8,24; takes 8,16", "sends 16,8; takes 32,8")):
        made.begin(rank, "all_to_all_single", pair, note=note, shape=(32, 4), dtype="bfloat16")
    made.pause(31)
    finding = diagnose(made.trace(), deadline_s=30.0, now_ns=made.now_ns)[0]
    assert finding.message.endswith("world rank 0 sends 24 to 1, which takes 32 from it.")
