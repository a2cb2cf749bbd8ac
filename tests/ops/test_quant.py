"""Pins what `quant=` means: scales and codes that a person can check, saturation, rows of zeros, NaN and infinities.

e4m3 has 3 bits behind the leading one: between 8 and 16 it holds the whole numbers, and its largest value is 448.
"""

from __future__ import annotations

import math

import pytest
import torch

from workbench.errors import ArgumentError
from workbench.ops import Quant, QuantKind, check_quant, quantise

INF, NAN = math.inf, math.nan
FLOOR_FP8, FLOOR_INT8 = 1 / (512 * 448), 1 / (512 * 127)


def norm(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.bfloat16)


def codes(x: torch.Tensor) -> list[list[float]]:
    return x.float().tolist()


def test_a_given_scale_divides_rounds_to_even_and_saturates() -> None:
    n = norm([1.0, -2.0, 8.5, 9.5, 448.0, 449.0, 1000.0, -1000.0])
    quant, scale = quantise(n, Quant("fp8", scale=1.0))
    assert (quant.dtype, scale.dtype, scale.tolist()) == (torch.float8_e4m3fn, torch.float32, [1.0])
    assert codes(quant) == [[1.0, -2.0, 8.0, 10.0, 448.0, 448.0, 448.0, -448.0]]
    half, scale = quantise(norm([1.0, 3.0, 300.0]), Quant("fp8", scale=0.5))
    assert (codes(half), scale.tolist()) == ([[2.0, 6.0, 448.0]], [0.5])


def test_each_token_has_the_scale_of_its_largest_element() -> None:
    quant, scale = quantise(norm([448.0, 224.0, -1.0, 0.0], [0.5, -1.75, 0.25, 0.0]), Quant("fp8_token"))
    assert scale.tolist() == [[1.0], [1.75 / 448]]  # 1 / 256
    assert codes(quant) == [[448.0, 224.0, -1.0, 0.0], [128.0, -448.0, 64.0, 0.0]]


def test_each_group_of_a_token_has_a_scale_of_its_own() -> None:
    n = norm([448.0, 1.0, 3.5, 1.75], [0.875, 0.0, -7.0, 3.5])
    quant, scale = quantise(n, Quant("fp8_group", group=2))
    assert scale.tolist() == [[1.0, 1 / 128], [1 / 512, 1 / 64]]
    assert codes(quant) == [[448.0, 1.0, 448.0, 224.0], [448.0, 0.0, -448.0, 224.0]]
    assert Quant("fp8_group").group == 128
    wide, scale = quantise(torch.ones(3, 256).bfloat16(), Quant("fp8_group"))
    assert (wide.shape, scale.shape) == ((3, 256), (3, 2))


def test_int8_has_127_on_either_side_and_rounds_to_even() -> None:
    quant, scale = quantise(norm([127.0, -127.0, 0.5, 1.5, 2.5, -0.5]), Quant("int8_token"))
    assert (quant.dtype, scale.tolist()) == (torch.int8, [[1.0]])
    assert quant.tolist() == [[127, -127, 0, 2, 2, 0]]


@pytest.mark.parametrize("kind", list(QuantKind))
def test_no_tokens_give_no_codes_and_scales_of_the_right_shape(kind: QuantKind) -> None:
    asked = Quant(kind, scale=1.0 if kind is QuantKind.FP8 else None)
    quant, scale = quantise(torch.empty(0, 256).bfloat16(), asked)
    shapes = {"fp8": (1,), "fp8_token": (0, 1), "fp8_group": (0, 2), "int8_token": (0, 1)}
    assert (quant.shape, scale.shape, quant.dtype) == ((0, 256), shapes[kind.value], kind.dtype)


@pytest.mark.parametrize(
    ("kind", "floor"), [("fp8_token", FLOOR_FP8), ("fp8_group", FLOOR_FP8), ("int8_token", FLOOR_INT8)]
)
def test_a_row_of_zeros_stays_zero_and_has_the_floor_for_a_scale(kind: str, floor: float) -> None:
    quant, scale = quantise(torch.zeros(2, 128).bfloat16(), Quant(kind))
    assert codes(quant) == [[0.0] * 128] * 2
    assert scale.flatten().tolist() == [torch.tensor(floor).item()] * 2


def test_signs_of_zero_survive_in_fp8() -> None:
    quant, _ = quantise(norm([0.0, -0.0, 1.0]), Quant("fp8_token"))
    assert quant.view(torch.uint8).tolist() == [[0x00, 0x80, 0x7E]]


def test_a_nan_spoils_its_row_alone_with_one_bit_pattern() -> None:
    n = norm([NAN, 1.0], [448.0, 1.0])
    n.view(torch.int16)[0, 0] = -1  # a negative NaN
    quant, scale = quantise(n, Quant("fp8_token"))
    assert quant.view(torch.uint8).tolist() == [[0x7F, 0x7F], [0x7E, 0x38]]
    assert scale.view(torch.int32).tolist() == [[0x7FFFFFFF], [0x3F800000]]
    quant, scale = quantise(n, Quant("int8_token"))
    assert quant.tolist() == [[0, 0], [127, 0]]
    assert scale[0].isnan().item()
    quant, _ = quantise(n, Quant("fp8", scale=1.0))
    assert quant.view(torch.uint8).tolist() == [[0x7F, 0x38], [0x7E, 0x38]]
    quant, scale = quantise(norm([NAN, 1.0, 448.0, 1.0]), Quant("fp8_group", group=2))
    assert quant.view(torch.uint8).tolist() == [[0x7F, 0x7F, 0x7E, 0x38]]


def test_an_infinity_makes_its_dynamic_scale_infinite_and_saturates_under_a_given_one() -> None:
    n = norm([INF, 1.0], [-INF, -1.0])
    quant, scale = quantise(n, Quant("fp8_token"))
    assert scale.tolist() == [[INF], [INF]]
    assert quant.view(torch.uint8).tolist() == [[0x7F, 0x00], [0x7F, 0x80]]
    assert (quant.float() * scale).isnan().all()  # nobody takes the row for a good one
    quant, _ = quantise(n, Quant("fp8", scale=2.0))
    assert codes(quant) == [[448.0, 0.5], [-448.0, -0.5]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_codes_times_scale_are_within_half_a_step_of_the_norm(dtype: torch.dtype) -> None:
    """A step of e4m3 is at most 1/8 of the value, so rounding moves it by at most 1/16; 2^-7 of scale for tiny ones."""
    n = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    for asked in (Quant("fp8", scale=0.01), Quant("fp8_token"), Quant("fp8_group", group=64)):
        quant, scale = quantise(n, asked)
        spread = scale.repeat_interleave(asked.group, dim=1) if asked.group else scale
        off = (quant.float() * spread - n.float()).abs()
        assert (off <= n.float().abs() / 16 + spread * 2**-7 + 1e-12).all()
    quant, scale = quantise(n, Quant("int8_token"))
    assert ((quant.float() * scale - n.float()).abs() <= scale * 0.5001).all()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"kind": "fp4"}, "Quant(kind='fp4'); allowed: fp8, fp8_token, fp8_group, int8_token"),
        ({"kind": "fp8"}, "Quant('fp8'): a scale belongs to kind 'fp8', which needs one"),
        ({"kind": "fp8_token", "scale": 1.0}, "a scale belongs to kind 'fp8'"),
        ({"kind": "fp8", "scale": 0.0}, "allowed: a scale whose fp32 value and its reciprocal are positive and finite"),
        ({"kind": "fp8", "scale": NAN}, "allowed: a scale whose"),
        ({"kind": "fp8", "scale": 1e-45}, "allowed: a scale whose"),
        ({"kind": "fp8", "scale": True}, "allowed: a scale whose"),
        ({"kind": "fp8_token", "group": 64}, "a group belongs to kind 'fp8_group'"),
        ({"kind": "fp8_group", "group": 0}, "allowed: a whole number of elements from 1 on"),
        ({"kind": "fp8_group", "group": 1.5}, "allowed: a whole number of elements from 1 on"),
    ],
)
def test_what_means_nothing_is_refused(fields: dict, told: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        Quant(**fields)
    assert told in str(refused.value)


def test_a_group_that_does_not_divide_the_row_and_what_is_no_quant_are_refused() -> None:
    check_quant(Quant("fp8_group", group=64), 128)
    with pytest.raises(
        ArgumentError, match=r"Quant\('fp8_group', group=48\): 128 elements a token are no whole number"
    ):
        check_quant(Quant("fp8_group", group=48), 128)
    with pytest.raises(ArgumentError, match="quant is a str; allowed: a Quant"):
        check_quant("fp8", 128)


def test_a_quant_prints_what_it_was_made_of() -> None:
    assert str(Quant("fp8", scale=0.5)) == "Quant('fp8', scale=0.5)"
    assert str(Quant("fp8_group")) == "Quant('fp8_group', group=128)"
    assert str(Quant(QuantKind.INT8_TOKEN)) == "Quant('int8_token')"
