"""Pins freeze (no workspace moves, bigger calls fall back over the same group), check mode, Partial in a Session."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.forked import run_ranks
from tests.runtime.layouts import FOUR, HIDDEN, fused_powers
from workbench.errors import ArgumentError, CapacityError, CaptureError, LayoutError, MismatchError, PartialError
from workbench.ops import Partial, ReduceOver
from workbench.runtime import Session
from workbench.trace import read_directory


def _prepare(session: Session, *kinds: str) -> None:
    for kind in kinds:
        session.prepare(kind, hidden=HIDDEN, dtype=torch.float32, max_tokens=4)


def test_after_freeze_a_bigger_call_falls_back_over_the_same_group_with_one_line_and_an_event(tmp_path) -> None:
    def body(rank: int) -> tuple[list[list[float]], list[str]]:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("workbench").addHandler(handler)
        with Session(FOUR, device="cpu", timeout_s=20, trace_dir=str(tmp_path)) as s:
            _prepare(s, "tp", "attn_cp")
            with pytest.raises(CapacityError):
                fused_powers(s, "attn_cp", 5)
            s.freeze()
            found = [fused_powers(s, "attn_cp", t).residual.unique().tolist() for t in (4, 5, 9, 4)]
            with pytest.raises(CaptureError, match="frozen"):
                s.prepare("attn_cp", hidden=HIDDEN, dtype=torch.float32, max_tokens=5)
            assert s.prepare("attn_cp", hidden=HIDDEN, dtype=torch.float32, max_tokens=3).capacity_tokens == 4
        return found, lines

    by_rank = run_ranks(4, body)
    assert [found for found, _ in by_rank] == [[[v]] * 4 for v in (10.0, 15.0, 10.0, 15.0)]
    assert len(by_rank[0][1]) == 2
    assert by_rank[0][1][0].startswith("attn_cp[0,2]: 5 tokens exceed the 4 of the frozen shm workspace; gloo reduces")
    assert by_rank[0][1][1] == "attn_cp[0,2]: 2 calls in all took the fallback"
    events = [e for rank in read_directory(tmp_path).ranks for e in rank.events if e.op == "fallback"]
    assert len(events) == 2 * 4  # two bigger calls on each of four ranks


@pytest.mark.parametrize("how", ["tokens", "dtype", "op", "eps", "strides"])
def test_check_mode_turns_different_calls_into_one_typed_error_on_every_member(how: str) -> None:
    def body(rank: int) -> str:
        with Session(FOUR, device="cpu", timeout_s=20, check=True) as s:
            _prepare(s, "tp")
            s.prepare("tp", hidden=HIDDEN, dtype=torch.bfloat16, max_tokens=4)
            odd = rank == 1
            dtype = torch.bfloat16 if odd and how == "dtype" else torch.float32
            x = torch.ones(3 if odd and how == "tokens" else 2, HIDDEN, dtype=dtype)
            if odd and how == "strides":
                x = torch.ones(HIDDEN, 2).t()
            residual, weight = torch.zeros(x.shape, dtype=dtype), torch.ones(HIDDEN, dtype=dtype)
            with pytest.raises(MismatchError) as e:
                if odd and how == "op":
                    s.all_reduce(x, group="tp")
                else:
                    s.all_reduce_add_rms_norm(
                        x, residual, weight, eps=1e-5 if odd and how == "eps" else 1e-6, group="tp"
                    )
            assert fused_powers(s, "tp", 1).residual.unique().tolist() == [20.0]
            return str(e.value)

    texts = set(run_ranks(4, body))
    assert len(texts) == 1
    assert "world rank 1: " in texts.pop()


def test_check_mode_finds_roots_that_differ() -> None:
    def body(rank: int) -> None:
        with (
            Session(FOUR, device="cpu", timeout_s=20, check=True) as s,
            pytest.raises(MismatchError, match="world rank 3: broadcast_object from group root 1"),
        ):
            s.broadcast_object(rank, group="tp", group_root=1 if rank == 3 else 0)

    run_ranks(4, body)


def test_a_partial_is_reduced_over_what_it_owes_once() -> None:
    def body(rank: int) -> tuple[list[float], list[float]]:
        with Session(FOUR, device="cpu", timeout_s=20) as s:
            _prepare(s, "tp", "moe_ep")
            residual, weight = torch.full((1, HIDDEN), 5.0), torch.ones(HIDDEN)
            part = Partial(torch.full((1, HIDDEN), 2.0**rank), owed=ReduceOver("moe_ep"))
            with pytest.raises(PartialError, match=r"group='tp' is tp\[0,1,2,3\]"):
                s.all_reduce(part, group="tp")
            first = s.all_reduce_add_rms_norm(part, residual, weight, eps=1e-6).residual.unique().tolist()
            with pytest.raises(PartialError, match="second reduce"):
                s.all_reduce(part)
            both = Partial(torch.full((1, HIDDEN), 2.0**rank), owed=ReduceOver("moe_ep", "moe_tp"))
            second = s.all_reduce(both).unique().tolist()
            with pytest.raises(ArgumentError, match="needs group=KIND"):
                s.all_reduce(residual)
            return first, second

    assert run_ranks(4, body) == [([v], [15.0]) for v in (10.0, 15.0, 10.0, 15.0)]


def test_kinds_that_overlap_or_whose_product_is_no_group_are_refused() -> None:
    def body(rank: int) -> None:
        with Session(FOUR, device="cpu", timeout_s=20) as s:
            x = torch.ones(1, HIDDEN)
            with pytest.raises(LayoutError, match="would count some ranks twice"):
                s.all_reduce(Partial(x, owed=ReduceOver("tp", "moe_tp")))
            with pytest.raises(LayoutError, match="count some ranks twice"):
                s.all_reduce(Partial(x, owed=ReduceOver("moe_ep", "attn_cp")))

    run_ranks(4, body)
