"""Pins the choice among backends: the first that every member accepts, alike on each member, and what the plan says."""

from __future__ import annotations

import pytest

from workbench.backends import custom
from workbench.errors import ArgumentError
from workbench.plan import (
    BUILT_KERNELS,
    Candidate,
    Plan,
    Standing,
    all_paths,
    decide_backend,
    find_switch,
    path_order,
    split_choice,
)
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


def test_switches_rule_out_the_paths_they_name() -> None:
    def told(settings: Settings, *, fused: bool = True) -> list[str]:
        return [name for name, path in all_paths().items() if find_switch(path, settings, fused=fused)]

    assert told(Settings(custom_all_reduce=False)) == ["shm", "custom.fused", "custom", "flashinfer_mnnvl"]
    assert told(Settings(fusion=False)) == ["shm", "custom.fused", "flashinfer", "flashinfer_mnnvl"]
    assert told(Settings(fusion=False), fused=False) == ["flashinfer_mnnvl"]
    assert told(Settings()) == ["flashinfer_mnnvl"]
    assert told(Settings(multicast=True)) == []
    shm = all_paths()["shm"]
    assert find_switch(shm, Settings(custom_all_reduce=False)) == "switched off by WORKBENCH_CUSTOM_ALL_REDUCE=0"
    assert find_switch(shm, Settings(fusion=False)) == "switched off by WORKBENCH_FUSION=0"


def test_each_path_has_one_backend_and_each_device_its_order() -> None:
    assert {name: path.backend for name, path in all_paths().items()} == {
        "shm": "shm",
        "gloo": "gloo",
        "custom.fused": "custom",
        "custom": "custom",
        "flashinfer": "flashinfer",
        "flashinfer_mnnvl": "flashinfer_mnnvl",
        "symm_mem": "symm_mem",
        "nccl_window": "nccl_window",
        "nccl": "nccl",
    }
    assert path_order("cpu") == ("shm", "gloo")
    assert path_order("cuda") == ("custom.fused", "custom", "symm_mem", "nccl")
    assert path_order("cuda", backend="custom") == ("custom.fused", "custom")
    assert path_order("cuda", backend="shm") == ()
    assert path_order("cuda", backend="flashinfer_mnnvl") == ("flashinfer_mnnvl",)


def test_the_kernels_of_the_plan_are_those_that_the_backend_says_it_has() -> None:
    assert {algorithm.value for algorithm in BUILT_KERNELS} == set(custom.ALGORITHMS)


@pytest.mark.parametrize(
    ("choice", "path", "algorithm"),
    [
        ("custom.fused.push", "custom.fused", "push"),
        ("custom.two_shot_pull", "custom", "two_shot_pull"),
        ("nccl", "nccl", ""),
        ("alone", "alone", ""),
    ],
)
def test_a_choice_is_a_path_and_an_algorithm(choice: str, path: str, algorithm: str) -> None:
    found, how = split_choice(choice)
    assert (found.name, how) == (path, algorithm)


def test_a_choice_of_no_path_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"no path gives 'none'; known: shm, gloo, custom\.fused"):
        split_choice("none")
