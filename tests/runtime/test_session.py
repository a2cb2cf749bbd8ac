"""Pins the main promise: on every subgroup of a real layout the fused result is exact and alike on all members.

World rank r contributes 2^r and the residual is 5, so the value itself says which ranks were summed.
"""

from __future__ import annotations

import os
import pickle
import time

import pytest
import torch
import torch.distributed as dist

from tests.forked import run_outcomes, run_ranks
from tests.runtime.layouts import FOUR, HIDDEN, KINDS, SIX, SIXTEEN, fused_powers
from workbench.errors import (
    ArgumentError,
    CapacityError,
    ClosedError,
    DeadlineError,
    LayoutError,
    PlanMismatchError,
    ResourceError,
)
from workbench.ranks import GroupMap
from workbench.runtime import Session

FOUR_SUMS = {  # 2^r over the members, for world ranks 0..3
    "tp": [15, 15, 15, 15],
    "attention_tp": [3, 3, 12, 12],  # [0,1] [2,3]
    "attn_cp": [5, 10, 5, 10],  # [0,2] [1,3]
    "moe_ep": [5, 10, 5, 10],
    "moe_tp": [3, 3, 12, 12],
}


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_every_subgroup_of_four_ranks_sums_its_own_members(backend: str) -> None:
    def body(rank: int) -> dict[tuple[str, int], list[float]]:
        found = {}
        with Session(FOUR, device="cpu", timeout_s=20) as s:
            for kind in KINDS:
                s.prepare(kind, hidden=HIDDEN, dtype=torch.float32, max_tokens=64, backend=backend)
                for tokens in (0, 1, 7, 64):
                    out = fused_powers(s, kind, tokens)
                    assert out.residual.shape == (tokens, HIDDEN)
                    found[kind, tokens] = out.residual.unique().tolist()
        return found

    by_rank = run_ranks(4, body)
    assert len(by_rank[0]) == 20
    for rank, found in enumerate(by_rank):
        for (kind, tokens), values in found.items():
            assert values == ([FOUR_SUMS[kind][rank] + 5.0] if tokens else []), (rank, kind, tokens)


@pytest.mark.parametrize("group_map", [SIX, SIXTEEN], ids=["six", "sixteen"])
def test_every_subgroup_of_more_ranks_sums_its_own_members(group_map: GroupMap) -> None:
    def body(rank: int) -> int:
        checked = 0
        with Session(group_map, device="cpu", timeout_s=40) as s:
            for kind in KINDS:
                s.prepare(kind, hidden=HIDDEN, dtype=torch.float32, max_tokens=64)
                wanted = float(sum(2**r for r in s.group(kind).world_ranks) + 5)
                for tokens in (0, 1, 7, 64):
                    out = fused_powers(s, kind, tokens)
                    assert out.residual.unique().tolist() == ([wanted] if tokens else [])
                    assert s.gather_object(out.norm.tolist(), group=kind) == [out.norm.tolist()] * s.group(kind).size
                    checked += 1
        return checked

    assert run_ranks(group_map.world_size, body) == [20] * group_map.world_size


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_bfloat16_residual_is_bit_equal_on_all_members(backend: str) -> None:
    def body(rank: int) -> list[int]:
        with Session(FOUR, device="cpu", timeout_s=20) as s:
            s.prepare("tp", hidden=HIDDEN, dtype=torch.bfloat16, max_tokens=7, backend=backend)
            x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16()
            residual = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(99)).bfloat16()
            out = s.all_reduce_add_rms_norm(x, residual, torch.ones(HIDDEN).bfloat16(), eps=1e-6, group="tp")
            return out.residual.view(torch.int16).flatten().tolist()

    first, *others = run_ranks(4, body)
    assert others == [first] * 3
    contributions = [torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(4)]
    residual = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(99)).bfloat16()
    total = sum((c.float() for c in contributions[1:]), contributions[0].float()) + residual.float()
    assert total.bfloat16().view(torch.int16).flatten().tolist() == first


def test_rounding_twice_gives_the_bits_of_the_unfused_chain() -> None:
    """In bf16 the sum 257 rounds to 256, and with the residual of 1 again to 256; rounded once, 258 comes out."""

    def body(rank: int) -> tuple[float, float]:
        with Session(GroupMap.build("sglang", tp=2), device="cpu", timeout_s=20) as s:
            found = []
            for rounding in ("once", "twice"):
                s.prepare("tp", hidden=8, dtype=torch.bfloat16, max_tokens=1, rounding=rounding)
                x = torch.full((1, 8), 256.0 if rank == 0 else 1.0).bfloat16()
                one = torch.ones_like(x)
                out = s.all_reduce_add_rms_norm(x, one, torch.ones(8).bfloat16(), eps=1e-6, group="tp")
                found.append(out.residual[0, 0].item())
            return found[0], found[1]

    assert run_ranks(2, body) == [(258.0, 256.0)] * 2


def test_all_reduce_alone_sums_without_residual() -> None:
    def body(rank: int) -> list[float]:
        with Session(FOUR, device="cpu", timeout_s=20) as s:
            s.prepare("attn_cp", hidden=HIDDEN, dtype=torch.float32, max_tokens=3)
            x = s.empty((3, HIDDEN), torch.float32, group="attn_cp")
            x.fill_(2.0**rank)
            return s.all_reduce(x, group="attn_cp").unique().tolist()

    assert run_ranks(4, body) == [[5.0], [10.0], [5.0], [10.0]]


def test_an_alias_is_its_owner_and_equal_lists_share_a_workspace() -> None:
    def body(rank: int) -> tuple[list[float], list[float]]:
        with Session(FOUR, device="cpu", timeout_s=20) as s:
            s.prepare("attn_cp", hidden=HIDDEN, dtype=torch.float32, max_tokens=1)
            return fused_powers(s, "moe_dp", 1).residual.unique().tolist(), fused_powers(
                s, "moe_ep", 1
            ).residual.unique().tolist()

    assert run_ranks(4, body)[1] == ([15.0], [15.0])


def test_a_group_of_one_rank_adds_and_normalises_alone() -> None:
    def body(rank: int) -> tuple[list[float], int]:
        with Session(FOUR, device="cpu", timeout_s=20) as s:
            plan = s.prepare("pp", hidden=HIDDEN, dtype=torch.float32, max_tokens=4)
            return fused_powers(s, "pp", 4).residual.unique().tolist(), plan.workspace_bytes

    assert run_ranks(4, body) == [([2.0**r + 5], 0) for r in range(4)]


def test_a_second_session_in_the_same_processes_works_and_the_default_group_is_given_back() -> None:
    def body(rank: int) -> list[list[float]]:
        found = []
        for group_map in (FOUR, GroupMap.build("vllm", tp=2, dp=2), FOUR):
            assert not dist.is_initialized()
            with Session(group_map, device="cpu", timeout_s=20) as s:
                s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=1)
                found.append(fused_powers(s, "tp", 1).residual.unique().tolist())
        assert not dist.is_initialized()
        return found

    assert run_ranks(4, body)[3] == [[20.0], [17.0], [20.0]]


def test_an_existing_default_group_is_used_and_kept() -> None:
    def body(rank: int) -> float:
        dist.init_process_group("gloo")
        with Session(FOUR, device="cpu", timeout_s=20) as s:
            s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=1)
            fused_powers(s, "tp", 1)
            inside = torch.tensor([float(rank)])
            dist.all_reduce(inside)
        outside = torch.tensor([float(rank)])
        dist.all_reduce(outside)
        return inside.item() + outside.item()

    assert run_ranks(4, body) == [12.0] * 4


def test_two_sessions_at_once_do_not_mix() -> None:
    def body(rank: int) -> tuple[list[float], list[float]]:
        with Session(FOUR, device="cpu", timeout_s=20) as a, Session(FOUR, device="cpu", timeout_s=20) as b:
            a.prepare("attention_tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=1)
            b.prepare("attn_cp", hidden=HIDDEN, dtype=torch.float32, max_tokens=1)
            return (
                fused_powers(a, "attention_tp", 1).residual.unique().tolist(),
                fused_powers(b, "attn_cp", 1).residual.unique().tolist(),
            )

    assert run_ranks(4, body) == [([8.0], [10.0]), ([8.0], [15.0]), ([17.0], [10.0]), ([17.0], [15.0])]


def test_different_maps_are_refused_alike_before_any_group_is_made() -> None:
    other = GroupMap.build("sglang", tp=4, attn_cp=4)

    def body(rank: int) -> None:
        Session(other if rank == 2 else FOUR, device="cpu", timeout_s=20)

    outcomes = run_outcomes(4, body)
    assert {type(o.error) for o in outcomes} == {PlanMismatchError}
    texts = {str(o.error) for o in outcomes}
    assert len(texts) == 1
    assert "world ranks 0, 1, 3 came with" in texts.pop()


def test_a_map_for_another_world_is_refused_alike() -> None:
    outcomes = run_outcomes(2, lambda rank: Session(FOUR, device="cpu", timeout_s=20))
    assert {type(o.error) for o in outcomes} == {LayoutError}
    assert "is for 4 ranks, but the job has 2" in str(outcomes[0].error)


def test_a_map_that_counts_ranks_per_engine_is_refused_alike() -> None:
    elastic = GroupMap.build("vllm", tp=1, dp=2, moe=True, elastic_ep=True, launch_checks=False)
    outcomes = run_outcomes(2, lambda rank: Session(elastic, device="cpu", timeout_s=20))
    assert {type(o.error) for o in outcomes} == {LayoutError}
    assert "count ranks inside one engine" in str(outcomes[0].error)


@pytest.mark.parametrize("default_group", [False, True], ids=["no-default-group", "default-group"])
def test_a_rank_that_opens_no_session_is_named(default_group: bool) -> None:
    def body(rank: int) -> str | None:
        if default_group:
            dist.init_process_group("gloo")
        if rank == 1:
            time.sleep(3)
            return None
        with pytest.raises(DeadlineError) as e:
            Session(FOUR, device="cpu", timeout_s=1.5)
        assert e.value.missing == (1,)
        return str(e.value)

    texts = run_ranks(4, body, timeout_s=30)
    for rank in (0, 2, 3):
        assert "for world rank 1" in texts[rank]


def test_an_exception_that_carries_ranks_survives_pickling() -> None:
    again = pickle.loads(pickle.dumps(DeadlineError("x", missing=(1, 2))))
    assert (str(again), again.missing) == ("x", (1, 2))


def test_one_members_bad_argument_is_every_members_error() -> None:
    def body(rank: int) -> list[str]:
        texts = []
        with Session(FOUR, device="cpu", timeout_s=20) as s:
            for wrong in (
                {"hidden": 0},
                {"dtype": torch.int8},
                {"max_tokens": 2.5},
                {"rounding": "thrice"},
                {"ops": []},
            ):
                good = {"hidden": HIDDEN, "dtype": torch.float32, "max_tokens": 1}
                with pytest.raises(ArgumentError) as e:
                    s.prepare("tp", **(good | wrong if rank == 3 else good))
                texts.append(str(e.value))
            s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=1)
            assert fused_powers(s, "tp", 1).residual.unique().tolist() == [20.0]
        return texts

    by_rank = run_ranks(4, body)
    assert by_rank == [by_rank[0]] * 4
    assert "world rank 3" in by_rank[0][0]


def test_members_that_prepare_for_different_sizes_are_told_alike() -> None:
    def body(rank: int) -> str:
        with Session(FOUR, device="cpu", timeout_s=20) as s:
            with pytest.raises(PlanMismatchError) as e:
                s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=8 if rank == 1 else 4)
            return str(e.value)

    texts = set(run_ranks(4, body))
    assert len(texts) == 1
    assert "world rank 1:" in texts.pop()


def test_a_call_that_does_not_fit_is_refused_before_any_wait_and_the_session_stays_good() -> None:
    def body(rank: int) -> None:
        with Session(FOUR, device="cpu", timeout_s=20) as s:
            s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=4)
            with pytest.raises(CapacityError, match="5 tokens asked, prepared for at most 4"):
                fused_powers(s, "tp", 5)
            with pytest.raises(ArgumentError, match="bfloat16 hidden 64 is not prepared"):
                fused_powers(s, "tp", 1, torch.bfloat16)
            with pytest.raises(LayoutError, match="tpp"):
                fused_powers(s, "tpp", 1)
            with pytest.raises(ArgumentError, match="nothing is prepared"):
                s.why("attn_cp")
            assert fused_powers(s, "tp", 4).residual.unique().tolist() == [20.0]

    run_ranks(4, body)


def test_why_tells_the_choice_the_bytes_and_the_limit() -> None:
    def body(rank: int) -> tuple[str, str, str]:
        with Session(FOUR, device="cpu", timeout_s=20) as s:
            s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=4)
            plan = s.why("tp")
            assert plan.capacity_tokens == 4
            assert plan.workspace_bytes > 0
            assert type(plan).from_json(plan.to_json()) == plan
            return plan.choice, str(plan), s.why("tp", tokens=5).choice

    by_rank = run_ranks(4, body)
    assert by_rank == [by_rank[0]] * 4
    assert by_rank[0][0] == "shm"
    assert "\n" not in by_rank[0][1]
    assert by_rank[0][2] == "none"


def test_preparing_more_tokens_replaces_the_workspace_and_fewer_keeps_it() -> None:
    def body(rank: int) -> list[int]:
        capacities = []
        with Session(FOUR, device="cpu", timeout_s=20) as s:
            for tokens in (4, 2, 32):
                capacities.append(
                    s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=tokens).capacity_tokens
                )
            assert fused_powers(s, "tp", 32).residual.unique().tolist() == [20.0]
        return capacities

    assert run_ranks(4, body) == [[4, 4, 32]] * 4


def test_a_backend_asked_by_name_that_cannot_serve_is_a_clear_error() -> None:
    def body(rank: int) -> str:
        with Session(FOUR, device="cpu", timeout_s=20) as s:
            with pytest.raises(ResourceError) as e:
                s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=4, backend="teleport")
            return str(e.value)

    assert "no path of cpu ranks is called 'teleport'" in run_ranks(4, body)[0]


def test_fusion_switched_off_takes_gloo_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_FUSION", "0")

    def body(rank: int) -> tuple[str, tuple[tuple[str, str], ...]]:
        with Session(FOUR, device="cpu", timeout_s=20) as s:
            plan = s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=4)
            assert fused_powers(s, "tp", 2).residual.unique().tolist() == [20.0]
            return plan.choice, plan.rejected

    choice, rejected = run_ranks(4, body)[0]
    assert choice == "gloo"
    assert rejected == (("shm", "switched off by WORKBENCH_FUSION=0"),)


def test_after_close_every_call_says_so() -> None:
    def body(rank: int) -> None:
        s = Session(FOUR, device="cpu", timeout_s=20)
        s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=1)
        fused_powers(s, "tp", 1)
        s.close()
        s.close()
        with pytest.raises(ClosedError):
            fused_powers(s, "tp", 1)
        with pytest.raises(ClosedError):
            s.barrier(group="tp")

    run_ranks(4, body)


def test_one_process_without_torchrun_is_a_world_of_one() -> None:
    def body(rank: int) -> list[float]:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
            os.environ.pop(name)
        with Session(GroupMap.build("sglang", tp=1), device="cpu") as s:
            s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=1)
            return fused_powers(s, "tp", 1).residual.unique().tolist()

    assert run_ranks(1, body) == [[6.0]]
