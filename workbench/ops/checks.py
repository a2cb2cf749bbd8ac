"""What a call's tensors must look like: one set of rules for all backends, checked before anything waits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workbench.errors import ArgumentError, CapacityError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a prepared workspace accepts, and who is asking. `group` is the group as text, such as 'tp[0,1]'."""

    hidden: int
    dtype: torch.dtype
    max_tokens: int
    group: str
    world_rank: int
    device: str = "cpu"

    def who(self) -> str:
        """'tp[0,1] on world rank 1'."""
        return f"{self.group} on world rank {self.world_rank}"


def check_arguments(
    limits: Limits, x: torch.Tensor, residual: torch.Tensor | None = None, weight: torch.Tensor | None = None
) -> int:
    """The number of tokens of a call that fits.

    Shapes: x [tokens, hidden]; residual the same; weight [hidden]; contiguous, of limits.dtype, on limits.device.
    Raises: CapacityError for more than limits.max_tokens, ArgumentError for anything else that does not fit. Local.
    """
    shape = x.shape
    dtype = limits.dtype
    on_cpu = limits.device == "cpu"
    # Written out, not looped: this runs before every call, and attributes of tensors cost about 50 ns each.
    if (
        len(shape) == 2
        and shape[1] == limits.hidden
        and x.dtype is dtype
        and x.is_cpu is on_cpu
        and x.is_contiguous()
        and (on_cpu or x.device.type == limits.device)
    ):
        tokens: int = shape[0]
        if tokens > limits.max_tokens:
            raise CapacityError(
                f"{limits.who()}: {tokens} tokens asked, prepared for at most {limits.max_tokens}; "
                f"prepare with max_tokens={tokens} or split the batch"
            )
        if residual is None and weight is None:
            return tokens
        if (
            residual is not None
            and weight is not None
            and residual.shape == shape
            and residual.dtype is dtype
            and residual.is_contiguous()
            and residual.is_cpu is on_cpu
            and weight.shape == shape[1:]
            and weight.dtype is dtype
            and weight.is_contiguous()
            and weight.is_cpu is on_cpu
            and (on_cpu or (residual.device == x.device and weight.device == x.device))
        ):
            return tokens
    raise ArgumentError(_complaint(limits, x, residual, weight))


def check_empty(limits: Limits, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The bytes of a buffer of `shape`. Raises ArgumentError for another dtype or a negative size. Local."""
    if dtype is not limits.dtype:
        raise ArgumentError(f"{limits.who()}: empty() of {dtype} asked, prepared for {limits.dtype}")
    num_bytes = dtype.itemsize
    for size in shape:
        if size < 0:
            raise ArgumentError(f"{limits.who()}: empty() of shape {tuple(shape)} asked; sizes must not be negative")
        num_bytes *= size
    return num_bytes


def _complaint(limits: Limits, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None) -> str:
    """The first thing that does not fit: what was given, what is allowed, what to do."""
    rows = f"[tokens, {limits.hidden}]"
    wanted = [("x", x, 2, limits.hidden, rows)]
    if residual is not None:
        wanted.append(("residual", residual, 2, limits.hidden, rows))
    if weight is not None:
        wanted.append(("weight", weight, 1, limits.hidden, f"[{limits.hidden}]"))
    for name, tensor, dims, last, form in wanted:
        if tensor.dtype is not limits.dtype:
            return f"{limits.who()}: {name} is {tensor.dtype}, prepared for {limits.dtype}; convert it"
        if tensor.device.type != limits.device:
            return f"{limits.who()}: {name} is on {tensor.device}, this workspace serves {limits.device}"
        if tensor.dim() != dims or tensor.shape[-1] != last:
            return f"{limits.who()}: {name} has shape {list(tensor.shape)}, expected {form}"
        if not tensor.is_contiguous():
            return (
                f"{limits.who()}: {name} of shape {list(tensor.shape)} has strides {tensor.stride()}, which is not "
                f"contiguous; pass {name}.contiguous()"
            )
    if residual is None or weight is None:
        return f"{limits.who()}: residual and weight go together; give both or neither"
    if x.device != residual.device or x.device != weight.device:
        return f"{limits.who()}: x, residual and weight are on {x.device}, {residual.device} and {weight.device}"
    return f"{limits.who()}: residual has shape {list(residual.shape)}, x has {list(x.shape)}; they must be equal"
