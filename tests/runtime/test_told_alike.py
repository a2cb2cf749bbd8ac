"""Pins that what one rank does wrong is told to the others: soon, alike, and by name. Found by trying to break it."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from tests.forked import run_outcomes, run_ranks
from tests.runtime.layouts import FOUR, HIDDEN, fused_powers
from workbench.errors import (
    ArgumentError,
    CaptureError,
    ClosedError,
    DeadlineError,
    MismatchError,
    PeerDeadError,
)
from workbench.ranks import GroupMap
from workbench.runtime import Session

TWO = GroupMap.custom({"tp": [[0, 1]]})
ORDERED = GroupMap.custom({"a": [[0, 1], [2]], "b": [[0, 1, 2]]})


@pytest.mark.parametrize(
    ("zero", "one", "told"),
    [
        (lambda s: s.barrier(group="tp"), lambda s: s.gather_object("x", group="tp"), "world rank 1: gather_object"),
        (lambda s: s.gather_object("x", group="tp"), lambda s: _prepared(s), "world rank 1: prepare"),
        (
            lambda s: s.broadcast_object(1, group="tp", group_root=0),
            lambda s: s.broadcast_object(1, group="tp", group_root=1),
            "world rank 1: broadcast_object from group root 1",
        ),
        (lambda s: s.barrier(group="tp"), lambda s: s.broadcast_object(1, group="tp"), "world rank 0: barrier"),
    ],
    ids=["barrier-gather", "gather-prepare", "roots", "barrier-broadcast"],
)
def test_different_exchanges_are_one_typed_error_on_both_and_the_group_stays_usable(zero, one, told: str) -> None:
    def body(rank: int) -> str:
        with Session(TWO, device="cpu", timeout_s=20) as s:
            with pytest.raises(MismatchError) as e:
                (one if rank else zero)(s)
            assert s.gather_object(rank, group="tp") == [0, 1]
            return str(e.value)

    texts = set(run_ranks(2, body))
    assert len(texts) == 1
    assert told in texts.pop()


def _prepared(s: Session) -> None:
    s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=4)


def test_ranks_out_of_step_are_told_and_not_given_each_others_values() -> None:
    def body(rank: int) -> str:
        with Session(TWO, device="cpu", timeout_s=20) as s:
            if rank == 0:
                s._groups[0, 1].channel._round += 1  # as if it had done one exchange more
            with pytest.raises(MismatchError) as e:
                s.gather_object(rank, group="tp")
            with pytest.raises(ClosedError):
                s.gather_object(rank, group="tp")
            return str(e.value)

    told = run_ranks(2, body)[0]
    assert "world rank 0: gather_object (as number 2 on this group); world rank 1: gather_object (as number 1" in told


def test_a_value_that_is_not_json_is_refused_before_any_wait() -> None:
    def body(rank: int) -> list[int]:
        with Session(TWO, device="cpu", timeout_s=20) as s:
            if rank == 0:
                with pytest.raises(ArgumentError, match="gather_object of set"):
                    s.gather_object({1}, group="tp")
            return s.gather_object(rank, group="tp")

    assert run_ranks(2, body) == [[0, 1]] * 2


def test_an_object_that_cannot_be_pickled_is_every_members_error() -> None:
    def body(rank: int) -> str:
        with Session(TWO, device="cpu", timeout_s=20) as s:
            with pytest.raises(ArgumentError) as e:
                s.broadcast_object(threading.Lock(), group="tp")
            return str(e.value)

    texts = set(run_ranks(2, body))
    assert len(texts) == 1
    assert "lock cannot be pickled" in texts.pop()


def test_a_rank_that_raises_inside_its_session_frees_the_others_at_once() -> None:
    def body(rank: int) -> tuple[str, float]:
        started = time.monotonic()
        try:
            with Session(TWO, device="cpu", timeout_s=20) as s:
                if rank == 1:
                    raise ZeroDivisionError("mine alone")
                s.barrier(group="tp")
        except (ZeroDivisionError, ClosedError) as e:
            if rank == 1:
                time.sleep(4)  # the process lives on
            return str(e), time.monotonic() - started
        raise AssertionError("no error")

    (text, waited), _ = run_ranks(2, body)
    print(f"told after {waited:.2f} s")
    assert "world rank 1 left its session: ZeroDivisionError: mine alone" in text
    assert waited < 4


def test_a_rank_that_closes_early_is_told_to_the_one_that_still_calls() -> None:
    def body(rank: int) -> str:
        s = Session(TWO, device="cpu", timeout_s=20)
        with pytest.raises(MismatchError) as e:
            if rank == 1:
                s.close()
            else:
                s.gather_object(1, group="tp")
        return str(e.value)

    texts = set(run_ranks(2, body))
    assert len(texts) == 1
    assert "world rank 0: gather_object; world rank 1: close" in texts.pop()


def test_one_ranks_bad_setting_is_every_ranks_error() -> None:
    def body(rank: int) -> str:
        if rank == 1:
            os.environ["WORKBENCH_FUSION"] = "yes"
        with pytest.raises(ArgumentError) as e:
            Session(TWO, device="cpu", timeout_s=20)
        return str(e.value)

    texts = set(run_ranks(2, body))
    assert texts == {"world rank 1 cannot open its Session: WORKBENCH_FUSION='yes'; allowed: 0 or 1"}


def test_a_switch_that_differs_between_ranks_is_refused_alike() -> None:
    def body(rank: int) -> str:
        os.environ["WORKBENCH_CUSTOM_ALL_REDUCE"] = str(rank)
        with pytest.raises(Exception, match="values of WORKBENCH_CUSTOM_ALL_REDUCE of the ranks differ") as e:
            Session(TWO, device="cpu", timeout_s=20)
        return type(e.value).__name__

    assert run_ranks(2, body) == ["PlanMismatchError"] * 2


def test_our_kernels_switched_off_take_the_librarys_path() -> None:
    def body(rank: int) -> tuple[str, str]:
        os.environ["WORKBENCH_CUSTOM_ALL_REDUCE"] = "0"
        with Session(TWO, device="cpu", timeout_s=20) as s:
            plan = s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=4)
            return plan.choice, plan.rejected[0][1]

    assert run_ranks(2, body)[0] == ("gloo", "switched off by WORKBENCH_CUSTOM_ALL_REDUCE=0")


def test_a_rank_that_dies_inside_a_capture_is_named_soon() -> None:
    def body(rank: int) -> tuple[int, ...]:
        with Session(TWO, device="cpu", timeout_s=30) as s:
            _prepared(s)
            with pytest.raises(PeerDeadError) as e, s.capture():
                if rank == 1:
                    os._exit(3)
            return e.value.dead

    outcomes = run_outcomes(2, body)
    assert outcomes[0].value == (1,)
    assert outcomes[0].elapsed_s < 15


@pytest.mark.parametrize("how", ["tokens", "residual", "eps"])
def test_what_cannot_run_is_refused_when_it_is_captured_not_when_it_is_replayed(how: str) -> None:
    def body(rank: int) -> str:
        with Session(TWO, device="cpu", timeout_s=20) as s:
            _prepared(s)
            odd = rank == 1
            x = torch.ones(9 if odd and how == "tokens" else 2, HIDDEN)
            residual = torch.ones(3 if odd and how == "residual" else x.shape[0], HIDDEN)
            with pytest.raises(CaptureError) as e, s.capture():
                s.all_reduce_add_rms_norm(
                    x, residual, torch.ones(HIDDEN), eps=1e-5 if odd and how == "eps" else 1e-6, group="tp"
                )
            return str(e.value)

    texts = set(run_ranks(2, body))
    assert len(texts) == 1
    assert "world rank 1" in texts.pop()


def test_groups_captured_in_opposite_orders_would_deadlock_and_are_refused() -> None:
    def body(rank: int) -> str:
        with Session(ORDERED, device="cpu", timeout_s=20) as s:
            for kind in ("a", "b"):
                s.prepare(kind, hidden=HIDDEN, dtype=torch.float32, max_tokens=4)
            x = torch.ones(1, HIDDEN)
            with pytest.raises(CaptureError) as e, s.capture():
                for kind in ("a", "b") if rank == 0 else ("b", "a"):
                    s.all_reduce(x, group=kind)
            return str(e.value)

    assert "a replay would deadlock: world rank 0 is at a[0,1], world rank 1 is at b[0,1,2]" in run_ranks(3, body)[0]


def test_a_replay_inside_another_capture_is_refused() -> None:
    def body(rank: int) -> None:
        with Session(TWO, device="cpu", timeout_s=20) as s:
            _prepared(s)
            with s.capture() as first:
                fused_powers(s, "tp", 1)
            with s.capture(), pytest.raises(CaptureError, match="replay"):
                first.replay()

    run_ranks(2, body)


def test_after_freeze_why_names_the_path_a_bigger_call_takes() -> None:
    def body(rank: int) -> tuple[str, str]:
        with Session(TWO, device="cpu", timeout_s=20) as s:
            _prepared(s)
            before = s.why("tp", tokens=99).choice
            s.freeze()
            return before, s.why("tp", tokens=99).choice

    assert run_ranks(2, body) == [("none", "gloo")] * 2


@pytest.mark.parametrize(
    "x", [None, "x", [1.0], torch.tensor(1.0), torch.ones(HIDDEN)], ids=["none", "text", "list", "scalar", "row"]
)
def test_what_is_no_batch_is_refused_by_one_rank_and_harms_nobody(x: object) -> None:
    def body(rank: int) -> list[float]:
        with Session(TWO, device="cpu", timeout_s=20) as s:
            _prepared(s)
            if rank == 1:
                with pytest.raises(ArgumentError):
                    s.all_reduce(x, group="tp")
            return fused_powers(s, "tp", 1).residual.unique().tolist()

    assert run_ranks(2, body) == [[8.0]] * 2


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_workspace_that_a_mismatch_broke_is_replaced_by_the_next_prepare(backend: str) -> None:
    def body(rank: int) -> list[float]:
        with Session(TWO, device="cpu", timeout_s=20) as s:
            s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=4, backend=backend)
            with pytest.raises(MismatchError):
                fused_powers(s, "tp", 1 + rank)
            with pytest.raises(ClosedError):
                fused_powers(s, "tp", 1)
            s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=4, backend=backend)
            return fused_powers(s, "tp", 1).residual.unique().tolist()

    assert run_ranks(2, body) == [[8.0]] * 2


def test_sessions_may_close_in_any_order() -> None:
    def body(rank: int) -> list[float]:
        outer = Session(FOUR, device="cpu", timeout_s=20)
        inner = Session(FOUR, device="cpu", timeout_s=20)
        inner.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=1)
        found = fused_powers(inner, "tp", 1).residual.unique().tolist()
        outer.close()
        inner.close()
        return found

    assert run_ranks(4, body) == [[20.0]] * 4


def test_what_is_no_group_map_and_a_world_that_is_no_number_are_refused() -> None:
    def body(rank: int) -> None:
        with pytest.raises(ArgumentError, match="group_map is a dict"):
            Session({"tp": [[0]]}, device="cpu")
        os.environ["WORLD_SIZE"] = "two"
        with pytest.raises(ArgumentError, match="WORLD_SIZE='two'"):
            Session(GroupMap.custom({"tp": [[0]]}), device="cpu")
        os.environ.update(WORLD_SIZE="1", MASTER_PORT="1")
        with pytest.raises((ArgumentError, DeadlineError), match=r"127\.0\.0\.1:1"):
            Session(GroupMap.custom({"tp": [[0]]}), device="cpu", timeout_s=1)

    run_ranks(1, body)
