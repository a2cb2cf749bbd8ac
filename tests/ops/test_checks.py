"""Pins which calls are refused, with which error, and that the message says what was given and what is allowed."""

import pytest
import torch

from workbench.errors import ArgumentError, CapacityError
from workbench.ops import Limits, check_arguments, check_empty

LIMITS = Limits(hidden=8, dtype=torch.bfloat16, max_tokens=4, group="tp[0,1]", world_rank=1)


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_a_call_that_fits_gives_its_tokens(tokens: int) -> None:
    assert check_arguments(LIMITS, tensor(tokens, 8)) == tokens
    assert check_arguments(LIMITS, tensor(tokens, 8), tensor(tokens, 8), tensor(8)) == tokens


def test_too_many_tokens_are_a_capacity_error_with_both_numbers() -> None:
    with pytest.raises(CapacityError, match=r"tp\[0,1\] on world rank 1: 5 tokens asked, prepared for at most 4"):
        check_arguments(LIMITS, tensor(5, 8))


REFUSED = {
    "dtype of x": ((tensor(1, 8, dtype=torch.float16),), "x is torch.float16, prepared for torch.bfloat16"),
    "hidden of x": ((tensor(1, 16),), r"x has shape \[1, 16\], expected \[tokens, 8\]"),
    "dimensions of x": ((tensor(8),), r"x has shape \[8\], expected \[tokens, 8\]"),
    "a transposed x": ((tensor(8, 2).t(),), r"x of shape \[2, 8\] has strides \(1, 2\), which is not contiguous"),
    "every second row": ((tensor(4, 8)[::2],), r"strides \(16, 1\).*pass x.contiguous\(\)"),
    "an expanded x": ((tensor(1, 8).expand(3, 8),), "not contiguous"),
    "device of x": ((torch.empty(1, 8, dtype=torch.bfloat16, device="meta"),), "x is on meta"),
    "tokens of residual": ((tensor(2, 8), tensor(1, 8), tensor(8)), r"residual has shape \[1, 8\], x has \[2, 8\]"),
    "dtype of residual": ((tensor(1, 8), tensor(1, 8, dtype=torch.float32), tensor(8)), "residual is torch.float32"),
    "strides of residual": ((tensor(2, 8), tensor(8, 2).t(), tensor(8)), "residual of shape .* not contiguous"),
    "shape of weight": ((tensor(1, 8), tensor(1, 8), tensor(1, 8)), r"weight has shape \[1, 8\], expected \[8\]"),
    "dtype of weight": ((tensor(1, 8), tensor(1, 8), tensor(8, dtype=torch.float32)), "weight is torch.float32"),
    "strides of weight": ((tensor(1, 8), tensor(1, 8), tensor(16)[::2]), "weight of shape .* not contiguous"),
    "weight missing": ((tensor(1, 8), tensor(1, 8)), "residual and weight go together"),
    "device of residual": (
        (tensor(1, 8), torch.empty(1, 8, dtype=torch.bfloat16, device="meta"), tensor(8)),
        "residual is on meta",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_call_that_does_not_fit_is_an_argument_error_that_says_why(case: str) -> None:
    arguments, message = REFUSED[case]
    with pytest.raises(ArgumentError, match=message):
        check_arguments(LIMITS, *arguments)


def test_another_device_is_served_where_the_limits_say_so() -> None:
    limits = Limits(hidden=8, dtype=torch.bfloat16, max_tokens=4, group="tp[0]", world_rank=0, device="meta")
    x = torch.empty(2, 8, dtype=torch.bfloat16, device="meta")
    assert check_arguments(limits, x, x, x[0]) == 2
    with pytest.raises(ArgumentError, match="x is on cpu, this workspace serves meta"):
        check_arguments(limits, tensor(1, 8))


def test_empty_gives_bytes_and_refuses_another_dtype_or_a_negative_size() -> None:
    assert check_empty(LIMITS, (3, 8), torch.bfloat16) == 48
    assert check_empty(LIMITS, (0, 8), torch.bfloat16) == 0
    with pytest.raises(ArgumentError, match=r"torch.float32 asked, prepared for torch.bfloat16"):
        check_empty(LIMITS, (1, 8), torch.float32)
    with pytest.raises(ArgumentError, match="must not be negative"):
        check_empty(LIMITS, (-1, 8), torch.bfloat16)
