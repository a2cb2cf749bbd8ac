"""Pins the rules of capture: what is recorded is replayed, nothing else collective happens inside, and one rank's
exception or missing call is every rank's error within seconds (upstream it is a hang: SGLang 11275)."""

from __future__ import annotations

import time

import pytest
import torch

from tests.forked import run_outcomes, run_ranks
from tests.runtime.layouts import FOUR, HIDDEN, fused_powers
from workbench.errors import ArgumentError, CaptureError, ClosedError, DeadlineError
from workbench.runtime import Session


def _session(timeout_s: float = 20, kinds: tuple[str, ...] = ("tp", "attn_cp")) -> Session:
    session = Session(FOUR, device="cpu", timeout_s=timeout_s)
    for kind in kinds:
        session.prepare(kind, hidden=HIDDEN, dtype=torch.float32, max_tokens=4)
    return session


def test_a_replay_computes_what_the_inputs_hold_now_on_two_groups() -> None:
    def body(rank: int) -> list[list[float]]:
        found = []
        with _session() as s:
            x, residual, weight = torch.zeros(2, HIDDEN), torch.full((2, HIDDEN), 5.0), torch.ones(HIDDEN)
            with s.capture() as c:
                fused = s.all_reduce_add_rms_norm(x, residual, weight, eps=1e-6, group="tp")
                summed = s.all_reduce(x, group="attn_cp")
            assert torch.isnan(fused.residual).all()  # nothing runs before a replay
            for scale in (1.0, 10.0):
                x.fill_(scale * 2.0**rank)
                c.replay()
                found.append(fused.residual.unique().tolist() + summed.unique().tolist())
        with pytest.raises(ClosedError):
            c.replay()
        return found

    assert run_ranks(4, body) == [[[20.0, r], [155.0, 10 * r]] for r in (5.0, 10.0, 5.0, 10.0)]


def test_nothing_else_collective_happens_inside_and_each_refusal_names_its_operation() -> None:
    def body(rank: int) -> None:
        with _session() as s:
            with s.capture() as c:
                for name, call in {
                    "prepare": lambda: s.prepare("pp", hidden=8, dtype=torch.float32, max_tokens=1),
                    "broadcast_object": lambda: s.broadcast_object(1, group="tp"),
                    "gather_object": lambda: s.gather_object(1, group="tp"),
                    "barrier": lambda: s.barrier(group="tp"),
                    "freeze": s.freeze,
                    "rebuild": s.rebuild,
                    "close": s.close,
                    "capture": lambda: s.capture().__enter__(),
                    "replay": c.replay,
                }.items():
                    with pytest.raises(CaptureError, match=name):
                        call()
                out = fused_powers(s, "tp", 1)
            c.replay()
            assert out.residual.unique().tolist() == [20.0]

    run_ranks(4, body)


def test_one_ranks_exception_is_every_ranks_error_within_seconds() -> None:
    def body(rank: int) -> tuple[str, str, list[float]]:
        with _session() as s:
            with pytest.raises(CaptureError) as e, s.capture():
                fused_powers(s, "tp", 1)
                if rank == 2:
                    raise ZeroDivisionError("of all things")
            again = fused_powers(s, "tp", 1).residual.unique().tolist()
            return str(e.value), type(e.value.__cause__).__name__, again

    started = time.monotonic()
    found = run_ranks(4, body)
    print(f"all ranks knew after {time.monotonic() - started:.1f} s")
    assert {text for text, _, _ in found} == {
        "the capture failed on world rank 2: ZeroDivisionError: of all things; no rank may replay"
    }
    assert [cause for _, cause, _ in found] == ["NoneType", "NoneType", "ZeroDivisionError", "NoneType"]
    assert [again for _, _, again in found] == [[20.0]] * 4


@pytest.mark.parametrize(
    ("tokens", "calls", "told"),
    [
        ([1, 1, 1, 1], [1, 1, 2, 1], "world rank 0: 1, world rank 1: 1, world rank 2: 2, world rank 3: 1"),
        ([1, 1, 3, 1], [1, 1, 1, 1], "call 1: world rank 0 captured all_reduce_add_rms_norm 1x64"),
    ],
    ids=["counts", "shapes"],
)
def test_members_that_captured_different_calls_are_told_before_any_replay(tokens, calls, told: str) -> None:
    def body(rank: int) -> str:
        with _session() as s:
            with pytest.raises(CaptureError) as e, s.capture() as c:
                for _ in range(calls[rank]):
                    fused_powers(s, "tp", tokens[rank])
            with pytest.raises(ClosedError):
                c.replay()
            return str(e.value)

    texts = set(run_ranks(4, body))
    assert len(texts) == 1
    assert told in texts.pop()


def test_an_unprepared_call_inside_is_every_ranks_error() -> None:
    def body(rank: int) -> tuple[str, str]:
        with _session(kinds=("tp",)) as s:
            with pytest.raises(CaptureError) as e, s.capture():
                fused_powers(s, "tp" if rank else "moe_ep", 1)
            return str(e.value), type(e.value.__cause__).__name__

    found = run_ranks(4, body)
    assert len({text for text, _ in found}) == 1
    assert "world rank 0: ArgumentError: attn_cp[0,2]: float32 hidden 64 is not prepared" in found[0][0]
    assert found[0][1] == ArgumentError.__name__


def test_a_rank_that_does_not_capture_is_named() -> None:
    def body(rank: int) -> tuple[int, ...] | None:
        with _session(timeout_s=2) as s:
            if rank == 3:
                time.sleep(5)
                return None
            with pytest.raises(DeadlineError) as e, s.capture():
                pass
            return e.value.missing

    assert [o.value for o in run_outcomes(4, body)][:3] == [(3,)] * 3


def test_a_workspace_that_a_capture_may_hold_outlives_its_replacement() -> None:
    def body(rank: int) -> list[float]:
        with _session() as s:
            x = torch.full((1, HIDDEN), 2.0**rank)
            with s.capture() as c:
                out = s.all_reduce(x, group="tp")
            s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=64)
            c.replay()
            return out.unique().tolist()

    assert run_ranks(4, body) == [[15.0]] * 4
