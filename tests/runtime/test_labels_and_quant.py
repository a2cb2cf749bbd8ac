"""Pins labels (recorded; compared in check mode and in captures) and `quant=` of the fused call on real ranks."""

from __future__ import annotations

import pytest
import torch

from tests.forked import run_ranks
from tests.runtime.layouts import EPS, FOUR, HIDDEN
from workbench.errors import ArgumentError, CaptureError, MismatchError
from workbench.ops import Quant, add_rms_norm, quantise
from workbench.ranks import GroupMap
from workbench.runtime import Session
from workbench.trace import Phase, read_directory

PAIR = GroupMap.custom({"tp": [[0, 1]]})
QUANTS = (Quant("fp8", scale=0.02), Quant("fp8_token"), Quant("fp8_group", group=32), Quant("int8_token"))


def opened(group_map: GroupMap = PAIR, dtype: torch.dtype = torch.float32, **options: object) -> Session:
    s = Session(group_map, device="cpu", timeout_s=20, **options)
    s.prepare("tp", hidden=HIDDEN, dtype=dtype, max_tokens=4)
    return s


def fused(s: Session, x: torch.Tensor, **more: object):
    weight = torch.linspace(0.5, 1.5, HIDDEN).to(x.dtype)
    return s.all_reduce_add_rms_norm(x, torch.full_like(x, 5), weight, eps=EPS, group="tp", **more)


def rows(rank: int, tokens: int = 4) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16()


def test_calls_that_look_alike_in_swapped_order_are_one_error_that_names_both_labels_on_both_ranks() -> None:
    def body(rank: int) -> tuple[str, list[float]]:
        with opened(check=True) as s:
            x = torch.ones(1, HIDDEN)
            with pytest.raises(MismatchError) as e:
                for label in ("attention", "mlp") if rank == 0 else ("mlp", "attention"):
                    s.all_reduce(x, group="tp", label=label)
            return str(e.value), s.all_reduce(x, group="tp", label="both").unique().tolist()

    found = run_ranks(2, body)
    assert found[0] == found[1]
    text, total = found[0]
    assert "world rank 0: all_reduce (sum), x float32 [1, 64] strides [64, 1], on shm, label 'attention'" in text
    assert "world rank 1: all_reduce (sum), x float32 [1, 64] strides [64, 1], on shm, label 'mlp'" in text
    assert total == [2.0]


def test_a_label_is_recorded_with_the_call(tmp_path) -> None:
    def body(rank: int) -> None:
        with opened(trace_dir=str(tmp_path)) as s:
            s.all_reduce(torch.ones(1, HIDDEN), group="tp", label="layer 3")
            fused(s, torch.ones(1, HIDDEN), label="layer 4", quant=Quant("fp8_token"))
            fused(s, torch.ones(1, HIDDEN))

    run_ranks(2, body)
    for rank in read_directory(tmp_path).ranks:
        begun = [e for e in rank.events if e.op.startswith("all_reduce") and e.phase is Phase.BEGIN]
        assert [(e.note, e.path) for e in begun] == [
            ("label layer 3", "shm"),
            ("label layer 4", "shm+quant"),
            ("", "shm"),
        ]


def test_captured_calls_with_other_labels_or_quants_may_not_be_replayed() -> None:
    def body(rank: int) -> list[str]:
        texts = []
        with opened() as s:
            x = torch.ones(1, HIDDEN)
            with pytest.raises(CaptureError) as e, s.capture():
                s.all_reduce(x, group="tp", label=("a", "b")[rank])
            texts.append(str(e.value))
            with pytest.raises(CaptureError) as e, s.capture():
                fused(s, x, quant=(Quant("fp8_token"), Quant("int8_token"))[rank])
            texts.append(str(e.value))
        return texts

    first, second = run_ranks(2, body)
    assert first == second
    assert "world rank 0 captured all_reduce 1x64 float32 on shm label 'a' but world rank 1 captured" in first[0]
    assert "Quant('fp8_token') on shm+quant" in first[1]


@pytest.mark.parametrize("backend", ["shm", "gloo", "alone"])
def test_quantised_norms_are_those_of_the_reference_with_equal_scales_on_all_members(backend: str) -> None:
    """Quantisation reads the rounded norm that the call gives, and what it gives has equal bits on every member."""

    def body(rank: int) -> list[tuple[list[int], list[int]]]:
        told = []
        kind = "pp" if backend == "alone" else "tp"
        with Session(FOUR, device="cpu", timeout_s=20) as s:
            named = {} if backend == "alone" else {"backend": backend}
            s.prepare(kind, hidden=HIDDEN, dtype=torch.bfloat16, max_tokens=4, **named)
            x = rows(0 if backend == "alone" else rank)
            residual, weight = rows(98), rows(99, 1)[0]
            parts = [x] if backend == "alone" else [rows(r) for r in range(4)]
            total = sum((p.float() for p in parts[1:]), parts[0].float())
            for quant in QUANTS:
                for tokens in (0, 1, 4):
                    out = s.all_reduce_add_rms_norm(
                        x[:tokens], residual[:tokens], weight, eps=EPS, group=kind, quant=quant
                    )
                    wanted = add_rms_norm(total[:tokens], residual[:tokens], weight, eps=EPS)
                    assert torch.equal(out.residual, wanted.residual)
                    codes, scale = quantise(out.norm, quant)
                    assert torch.equal(out.quant.view(torch.uint8), codes.view(torch.uint8))
                    assert torch.equal(out.scale.view(torch.int32), scale.view(torch.int32))
                    told.append((out.scale.view(torch.int32).flatten().tolist(), out.quant.view(torch.uint8).tolist()))
        return told

    by_rank = run_ranks(4, body)
    assert len(by_rank[0]) == 12
    assert by_rank == [by_rank[0]] * 4


def test_a_literal_row_that_a_person_can_check() -> None:
    """x is 1 and 2, the residual 0: a sum of 3, a norm of 1 times weights of 1, 2, 4 ... 64, and codes of 448 / 2^k."""

    def body(rank: int) -> tuple[list[float], list[float]]:
        with Session(PAIR, device="cpu", timeout_s=20) as s:
            s.prepare("tp", hidden=8, dtype=torch.float32, max_tokens=1)
            x = torch.full((1, 8), float(rank + 1))
            weight = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 0.0])
            out = s.all_reduce_add_rms_norm(x, torch.zeros(1, 8), weight, eps=0.0, group="tp", quant=Quant("fp8_token"))
            assert out.norm.tolist() == [weight.tolist()]
            return out.quant.float().flatten().tolist(), out.scale.flatten().tolist()

    scale = torch.tensor(64 / 448).item()
    assert run_ranks(2, body) == [([7.0, 14.0, 28.0, 56.0, 112.0, 224.0, 448.0, 0.0], [scale])] * 2


def test_a_replay_fills_codes_and_scales_too() -> None:
    def body(rank: int) -> tuple[bool, list[list[float]]]:
        with opened(dtype=torch.bfloat16) as s:
            x, residual = rows(rank, 2), torch.zeros(2, HIDDEN).bfloat16()
            weight = torch.ones(HIDDEN).bfloat16()
            with s.capture() as c:
                out = s.all_reduce_add_rms_norm(
                    x, residual, weight, eps=EPS, group="tp", quant=Quant("fp8_token"), label="l"
                )
            unfilled = bool(out.quant.float().isnan().all() and out.scale.isnan().all())
            scales = []
            for factor in (1.0, 0.0):
                x.mul_(factor)
                c.replay()
                codes, scale = quantise(out.norm, Quant("fp8_token"))
                assert torch.equal(out.quant.view(torch.uint8), codes.view(torch.uint8))
                assert torch.equal(out.scale, scale)
                scales.append(out.scale.flatten().tolist())
            return unfilled, scales[1:]

    floor = torch.tensor(1 / (512 * 448)).item()
    assert run_ranks(2, body) == [(True, [[floor, floor]])] * 2


def test_a_quant_that_does_not_fit_is_refused_before_any_wait() -> None:
    def body(rank: int) -> list[float]:
        with opened() as s:
            if rank == 1:
                for wrong in (Quant("fp8_group", group=48), "fp8"):
                    with pytest.raises(ArgumentError):
                        fused(s, torch.ones(1, HIDDEN), quant=wrong)
            out = fused(s, torch.ones(1, HIDDEN), quant=None)
            assert (out.quant, out.scale) == (None, None)
            return out.residual.unique().tolist()

    assert run_ranks(2, body) == [[7.0]] * 2


def test_check_mode_finds_quants_that_differ() -> None:
    def body(rank: int) -> str:
        with opened(check=True) as s, pytest.raises(MismatchError) as e:
            fused(s, torch.ones(1, HIDDEN), quant=Quant("fp8", scale=0.5 if rank else 0.25))
        return str(e.value)

    texts = set(run_ranks(2, body))
    assert len(texts) == 1
    text = texts.pop()
    assert "Quant('fp8', scale=0.25)" in text
    assert "Quant('fp8', scale=0.5)" in text
