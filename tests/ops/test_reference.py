"""Pins the numerical contract with values a person can check by hand."""

import pytest
import torch

from workbench.ops import (
    Rounding,
    add_rms_norm,
    reference_all_reduce,
    reference_all_reduce_add_rms_norm,
    round_to,
)


def row(*values: float, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.tensor([values], dtype=dtype)


def residual_of(contributions: list[float], residual: float, dtype: torch.dtype, rounding: Rounding) -> float:
    return reference_all_reduce_add_rms_norm(
        [row(x, dtype=dtype) for x in contributions],
        row(residual, dtype=dtype),
        torch.ones(1, dtype=dtype),
        eps=1e-6,
        rounding=rounding,
    ).residual.item()


def test_sum_is_accumulated_in_fp32() -> None:
    assert reference_all_reduce([row(256), row(1), row(1), row(1)]).item() == 260  # bf16 steps would give 256
    assert reference_all_reduce([row(20000, dtype=torch.float16)] * 3).item() == 60000


def test_sum_follows_group_rank_order() -> None:
    values = [row(x, dtype=torch.float32) for x in (1e8, 1, -1e8, 1)]
    assert reference_all_reduce(values).item() == 1
    assert reference_all_reduce(values[1:] + values[:1]).item() == 0


def test_fp16_sum_beyond_its_range_is_saved_by_the_residual_when_rounded_once() -> None:
    assert residual_of([20000] * 4, -30000, torch.float16, Rounding.ONCE) == 49984
    assert residual_of([20000] * 4, -30000, torch.float16, Rounding.TWICE) == float("inf")


@pytest.mark.parametrize(("total", "residual", "once", "twice"), [(257, 1, 258, 256), (259, -1, 258, 260)])
def test_one_and_two_roundings_differ(total: float, residual: float, once: float, twice: float) -> None:
    contributions = [256.0, total - 256.0]
    assert residual_of(contributions, residual, torch.bfloat16, Rounding.ONCE) == once
    assert residual_of(contributions, residual, torch.bfloat16, Rounding.TWICE) == twice


def test_two_roundings_are_the_bits_of_the_unfused_chain() -> None:
    generator = torch.Generator().manual_seed(1)
    xs = [torch.randn(4, 4096, generator=generator).bfloat16() for _ in range(4)]
    residual = torch.randn(4, 4096, generator=generator).bfloat16()
    total = xs[0].float() + xs[1].float() + xs[2].float() + xs[3].float()
    chain = total.bfloat16() + residual
    weight = torch.ones(4096, dtype=torch.bfloat16)
    twice = reference_all_reduce_add_rms_norm(xs, residual, weight, eps=1e-6, rounding=Rounding.TWICE)
    once = reference_all_reduce_add_rms_norm(xs, residual, weight, eps=1e-6)
    assert torch.equal(twice.residual, chain)
    assert 0.2 < (once.residual != chain).float().mean() < 0.3


@pytest.mark.parametrize(("weight", "expected"), [(0.00390625, 1.00390625), (15.8125, 16.8125)])
def test_weight_bias_is_added_in_fp32(weight: float, expected: float) -> None:
    out = add_rms_norm(torch.full((1, 4), 3.0), torch.zeros(1, 4), torch.full((4,), weight), eps=0.0, weight_bias=1.0)
    assert out.norm.tolist() == [[expected] * 4]
    # In bf16 the bias would have been lost: bf16(0.00390625 + 1) is 1.0.
    bf16 = add_rms_norm(
        torch.full((1, 4), 3.0), row(0, 0, 0, 0), torch.full((4,), weight).bfloat16(), eps=0.0, weight_bias=1.0
    )
    assert bf16.norm.tolist() == torch.full((1, 4), expected).bfloat16().tolist()


def test_eps_is_the_callers() -> None:
    constant = torch.full((1, 8), 0.02)
    norms = [
        add_rms_norm(constant, torch.zeros(1, 8), torch.ones(8), eps=eps).norm[0, 0].item() for eps in (1e-5, 1e-6)
    ]
    assert norms == pytest.approx([0.98773, 0.99875], abs=1e-5)


def test_a_zero_row_with_eps_zero_is_nan() -> None:
    assert add_rms_norm(torch.zeros(1, 2), row(0, 0), row(1, 1)[0], eps=0.0).norm.isnan().all()


def test_a_doubled_sum_shows_beside_a_residual() -> None:
    h, residual, weight = torch.tensor([[1.0, 2, 3, 4]]), torch.full((1, 4), 10.0), torch.ones(4)
    right = add_rms_norm(h, residual, weight, eps=0.0).norm[0, 0].item()
    doubled = add_rms_norm(4 * h, residual, weight, eps=0.0).norm[0, 0].item()
    assert (round(right, 4), round(doubled, 4)) == (0.8765, 0.6831)  # 11/sqrt(157.5) and 14/sqrt(420)


def test_minus_zero_survives_only_if_every_contribution_is_minus_zero() -> None:
    assert reference_all_reduce([row(-0.0), row(-0.0)]).view(torch.int16).item() == -0x8000
    assert reference_all_reduce([row(-0.0), row(0.0)]).view(torch.int16).item() == 0


@pytest.mark.parametrize(
    ("dtype", "integer", "expected"),
    [
        (torch.bfloat16, torch.int16, 0x7FFF),
        (torch.float16, torch.int16, 0x7FFF),
        (torch.float32, torch.int32, 0x7FFFFFFF),
    ],
)
def test_every_nan_has_the_same_bits(dtype: torch.dtype, integer: torch.dtype, expected: int) -> None:
    nan = torch.tensor([float("nan"), -float("nan")] * 20)
    assert set(round_to(nan, dtype).view(integer).tolist()) == {expected}


def test_contributions_are_not_written() -> None:
    xs = [torch.ones(2, 3), torch.ones(2, 3)]
    reference_all_reduce(xs)
    assert xs[0].tolist() == [[1, 1, 1]] * 2


def test_no_tokens_give_empty_outputs() -> None:
    out = add_rms_norm(torch.zeros(0, 4), torch.zeros(0, 4), torch.ones(4), eps=1e-6)
    assert out.norm.shape == out.residual.shape == (0, 4)
