"""Pins which calls are refused, with which error, and that the message says what was given and what is allowed."""

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from workbench.errors import ArgumentError, CapacityError
from workbench.ops import Limits, Op, check_all_reduce, check_empty, check_fused

LIMITS = Limits(hidden=8, dtype=torch.bfloat16, max_tokens=4, group="tp[0,1]", world_rank=1)


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_a_call_that_fits_gives_its_tokens(tokens: int) -> None:
    assert check_all_reduce(LIMITS, tensor(tokens, 8)) == tokens
    assert check_fused(LIMITS, tensor(tokens, 8), tensor(tokens, 8), tensor(8), 1e-6, 0.0) == tokens


def test_too_many_tokens_are_a_capacity_error_with_both_numbers() -> None:
    with pytest.raises(CapacityError, match=r"tp\[0,1\] on world rank 1: 5 tokens asked, prepared for at most 4"):
        check_all_reduce(LIMITS, tensor(5, 8))
    with pytest.raises(CapacityError, match="5 tokens asked"):
        check_fused(LIMITS, tensor(5, 8), tensor(5, 8), tensor(8), 1e-6, 0.0)


def fake() -> torch.Tensor:
    """A tensor of shapes only, whose address is 0."""
    with FakeTensorMode():
        return tensor(1, 8)


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor(*shape))


def freed(*shape: int, left_bytes: int = 0) -> torch.Tensor:
    """A tensor that keeps its shape while its memory is cut down, as FSDP does."""
    cut = tensor(*shape)
    cut.untyped_storage().resize_(left_bytes)
    return cut


REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
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
    "residual missing": ((tensor(1, 8), None, tensor(8)), "residual is None, expected a tensor"),
    "weight missing": ((tensor(1, 8), tensor(1, 8), None), "weight is None, expected a tensor"),
    "no x": ((None,), "x is None, expected a tensor"),
    "text for x": (("x",), "x is a str, expected a tensor"),
    "a list for x": (([[0.0] * 8],), "x is a list, expected a tensor"),
    "a negated x": ((torch._neg_view(tensor(1, 8)),), r"x is a lazy negation.*pass x.resolve_neg\(\)"),
    "a negated residual": ((tensor(1, 8), torch._neg_view(tensor(1, 8)), tensor(8)), "residual is a lazy negation"),
    "a negated weight": ((tensor(1, 8), tensor(1, 8), torch._neg_view(tensor(8))), "weight is a lazy negation"),
    "a sparse x": ((tensor(1, 8).to_sparse(),), r"x is a torch.sparse_coo tensor.*pass x.to_dense\(\)"),
    "an mkldnn x": ((tensor(1, 8).to_mkldnn(),), "x is a torch._mkldnn tensor"),
    "a complex x": ((torch.zeros(1, 8, dtype=torch.complex64).conj(),), "x is torch.complex64"),
    "a freed x": ((freed(2, 8),), "x needs 32 bytes, and its storage was cut to 0, as FSDP does"),
    "half an x": ((freed(2, 8, left_bytes=16),), "x needs 32 bytes, and its storage was cut to 16"),
    "a freed residual": ((tensor(1, 8), freed(1, 8), tensor(8)), "residual needs 16 bytes"),
    "a freed weight": ((tensor(1, 8), tensor(1, 8), freed(8)), "weight needs 16 bytes"),
    "a fake x": ((fake(),), "x is a FakeTensor, which has no memory of its own"),
    "gradients of x": ((parameter(1, 8),), r"x requires grad.*pass x.detach\(\), or call it under torch.no_grad\(\)"),
    "gradients of residual": ((tensor(1, 8), parameter(1, 8), tensor(8)), "residual requires grad"),
    "gradients of weight": ((tensor(1, 8), tensor(1, 8), parameter(8)), "weight requires grad"),
    "device of residual": (
        (tensor(1, 8), torch.empty(1, 8, dtype=torch.bfloat16, device="meta"), tensor(8)),
        "residual is on meta",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_call_that_does_not_fit_is_an_argument_error_that_says_why(case: str) -> None:
    arguments, message = REFUSED[case]
    with pytest.raises(ArgumentError, match=message):
        if len(arguments) == 1:
            check_all_reduce(LIMITS, *arguments)
        else:
            check_fused(LIMITS, *arguments, 1e-6, 0.0)


@pytest.mark.parametrize(
    ("eps", "weight_bias", "message"),
    [
        ("1e-6", 0.0, r"eps is '1e-6' \(str\), expected a number; pass a float"),
        (None, 0.0, r"eps is None \(NoneType\), expected a number"),
        (True, 0.0, r"eps is True \(bool\), expected a number"),
        (torch.tensor(1e-6), 0.0, r"eps is tensor.* \(Tensor\), expected a number"),
        (float("nan"), 0.0, "eps is nan, expected a number from 0 on"),
        (-1e-6, 0.0, "eps is -1e-06, expected a number from 0 on"),
        (float("inf"), 0.0, "eps is inf"),
        (1e39, 0.0, r"eps is 1e\+39"),
        (1e-6, "1", r"weight_bias is '1' \(str\), expected a number"),
        (1e-6, None, "weight_bias is None"),
        (1e-6, float("nan"), "weight_bias is nan, expected a number finite in fp32"),
        (1e-6, float("-inf"), "weight_bias is -inf"),
    ],
)
def test_eps_and_weight_bias_are_finite_numbers(eps: Any, weight_bias: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        check_fused(LIMITS, tensor(1, 8), tensor(1, 8), tensor(8), eps, weight_bias)


@pytest.mark.parametrize(("eps", "weight_bias"), [(0.0, 1.0), (0, -1), (1e-5, 0)])
def test_eps_0_and_whole_numbers_are_fine(eps: float, weight_bias: float) -> None:
    assert check_fused(LIMITS, tensor(1, 8), tensor(1, 8), tensor(8), eps, weight_bias) == 1


def test_what_requires_grad_is_served_without_grad_mode() -> None:
    with torch.no_grad():
        assert check_fused(LIMITS, parameter(2, 8), parameter(2, 8), parameter(8), 1e-6, 0.0) == 2
    with torch.inference_mode():
        assert check_all_reduce(LIMITS, parameter(2, 8)) == 2
    assert check_all_reduce(LIMITS, parameter(2, 8).detach()) == 2


def test_a_subclass_that_only_adds_names_is_served() -> None:
    class Named(torch.nn.Parameter):
        pass

    with torch.no_grad():
        assert check_all_reduce(LIMITS, tensor(3, 8).as_subclass(Named)) == 3


def test_an_op_that_was_not_prepared_is_refused() -> None:
    limits = Limits(
        hidden=8, dtype=torch.bfloat16, max_tokens=4, group="tp[0]", world_rank=0, ops=frozenset({Op.ALL_REDUCE})
    )
    assert check_all_reduce(limits, tensor(1, 8)) == 1
    with pytest.raises(ArgumentError, match=r"all_reduce_add_rms_norm asked, prepared for all_reduce only; name it in"):
        check_fused(limits, tensor(1, 8), tensor(1, 8), tensor(8), 1e-6, 0.0)


def test_another_device_is_served_where_the_limits_say_so() -> None:
    limits = Limits(hidden=8, dtype=torch.bfloat16, max_tokens=4, group="tp[0]", world_rank=0, device="meta")
    x = torch.empty(2, 8, dtype=torch.bfloat16, device="meta")
    assert check_fused(limits, x, x, x[0], 1e-6, 0.0) == 2
    with pytest.raises(ArgumentError, match="x is on cpu, this workspace serves meta"):
        check_all_reduce(limits, tensor(1, 8))


def test_empty_gives_bytes_and_refuses_another_dtype_or_a_negative_size() -> None:
    assert check_empty(LIMITS, (3, 8), torch.bfloat16) == 48
    assert check_empty(LIMITS, (0, 8), torch.bfloat16) == 0
    with pytest.raises(ArgumentError, match=r"torch.float32 asked, prepared for torch.bfloat16"):
        check_empty(LIMITS, (1, 8), torch.float32)
    with pytest.raises(ArgumentError, match="must not be negative"):
        check_empty(LIMITS, (-1, 8), torch.bfloat16)
