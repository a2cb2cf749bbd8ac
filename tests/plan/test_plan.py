"""Pins the choice among backends: the first that every member accepts, alike on each member, and what the plan says."""

from __future__ import annotations

from workbench.plan import Candidate, Plan, Standing, decide_backend, find_switch
from workbench.settings import Settings

OK = (True, "fine")


def test_the_first_candidate_that_every_member_accepts_is_chosen() -> None:
    shm = Candidate("shm", ((4, *OK), (6, *OK)))
    gloo = Candidate("gloo", ((4, *OK), (6, *OK)))
    assert decide_backend([shm, gloo]) == ("shm", ())


def test_one_members_refusal_refuses_for_all_and_names_its_world_rank() -> None:
    shm = Candidate("shm", ((4, *OK), (6, False, "no compiler")))
    gloo = Candidate("gloo", ((4, *OK), (6, *OK)))
    assert decide_backend([shm, gloo]) == ("gloo", (("shm", "world rank 6: no compiler"),))


def test_equal_refusals_are_told_once_and_different_ones_apart() -> None:
    shm = Candidate("shm", ((0, False, "a"), (1, False, "b"), (2, False, "a")))
    assert decide_backend([shm]) == (None, (("shm", "world ranks 0, 2: a; world rank 1: b"),))


def test_no_candidate_is_no_choice() -> None:
    assert decide_backend([]) == (None, ())


def test_a_plan_prints_on_one_line_and_survives_json() -> None:
    plan = Plan(
        group="tp[0,1]",
        choice="gloo",
        reason="the first path that every member can take",
        rejected=(("shm", "world rank 1: no compiler"),),
        capacity_tokens=64,
        workspace_bytes=0,
        standing=Standing.DEFAULT,
    )
    assert Plan.from_json(plan.to_json()) == plan
    assert str(plan) == (
        "tp[0,1]: gloo (default): the first path that every member can take; up to 64 tokens in 0 bytes a rank; "
        "not shm: world rank 1: no compiler"
    )


def test_equal_reasons_are_printed_once() -> None:
    plan = Plan(group="tp[0,1]", choice="c", reason="r", rejected=(("a", "far"), ("b", "far"), ("d", "off")))
    assert str(plan).endswith("; not a, b: far; not d: off")


def test_switches_rule_out_the_backends_they_name() -> None:
    off = "switched off by WORKBENCH_CUSTOM_ALL_REDUCE=0"
    told = {b: find_switch(b, Settings(custom_all_reduce=False)) for b in ("shm", "custom", "nccl", "gloo", "alone")}
    assert told == {"shm": off, "custom": off, "nccl": "", "gloo": "", "alone": ""}
    told = {b: find_switch(b, Settings(fusion=False)) for b in ("shm", "custom", "nccl")}
    assert told == {"shm": "switched off by WORKBENCH_FUSION=0", "custom": "", "nccl": ""}
    assert find_switch("shm", Settings()) == ""
