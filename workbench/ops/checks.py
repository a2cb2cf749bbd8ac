"""What a call's tensors must look like: one set of rules for all backends, checked before anything waits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workbench.errors import ArgumentError, CapacityError
from workbench.ops.fused import ALL, Op

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_STRIDED = torch.strided
_LARGEST = torch.finfo(torch.float32).max  # eps and weight_bias reach the kernels in fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a prepared workspace accepts, and who is asking. `group` is the group as text, such as 'tp[0,1]'."""

    hidden: int
    dtype: torch.dtype
    max_tokens: int
    group: str
    world_rank: int
    device: str = "cpu"
    ops: frozenset[Op] = ALL

    def who(self) -> str:
        """'tp[0,1] on world rank 1'."""
        return f"{self.group} on world rank {self.world_rank}"


def check_all_reduce(limits: Limits, x: torch.Tensor) -> int:
    """The number of tokens of an all_reduce that fits.

    Shapes: x [tokens, hidden]; contiguous, of limits.dtype, on limits.device, and not to be differentiated.
    Raises: CapacityError for more than limits.max_tokens, ArgumentError for anything else that does not fit. Local.
    """
    try:
        if _fits(limits.device == "cpu", limits, x) and (limits.ops is ALL or Op.ALL_REDUCE in limits.ops):
            shape = x.shape
            if len(shape) == 2 and shape[1] == limits.hidden:
                return _tokens_within(limits, shape[0])
    except (AttributeError, RuntimeError):
        pass  # x is no tensor, or has no shape or strides (nested, sparse): told below
    raise ArgumentError(_complaint(limits, Op.ALL_REDUCE, (("x", x, 2),)))


def check_fused(
    limits: Limits, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_bias: float
) -> int:
    """The number of tokens of an all_reduce_add_rms_norm that fits.

    Shapes: x, residual [tokens, hidden]; weight [hidden]; each as check_all_reduce says, all on one device.
    Units: eps and weight_bias are Python numbers; eps from 0 on, both finite in fp32.
    Raises: as check_all_reduce. Local.
    """
    on_cpu = limits.device == "cpu"
    try:
        if (
            _fits(on_cpu, limits, x)
            and _fits(on_cpu, limits, residual)
            and _fits(on_cpu, limits, weight)
            and (limits.ops is ALL or Op.ALL_REDUCE_ADD_RMS_NORM in limits.ops)
            and (type(eps) is float or _is_number(eps))
            and (type(weight_bias) is float or _is_number(weight_bias))
            and 0.0 <= eps <= _LARGEST
            and -_LARGEST <= weight_bias <= _LARGEST
        ):
            shape = x.shape
            if (
                len(shape) == 2
                and shape[1] == limits.hidden
                and residual.shape == shape
                and weight.shape == shape[1:]
                and (on_cpu or (residual.device == x.device and weight.device == x.device))
            ):
                return _tokens_within(limits, shape[0])
    except (AttributeError, RuntimeError):
        pass  # as above
    tensors = (("x", x, 2), ("residual", residual, 2), ("weight", weight, 1))
    raise ArgumentError(_complaint(limits, Op.ALL_REDUCE_ADD_RMS_NORM, tensors, eps, weight_bias))


def _fits(on_cpu: bool, limits: Limits, tensor: torch.Tensor) -> bool:
    """What is asked of every tensor. Runs before every call; attributes of tensors cost about 50 ns each.

    The kernels read memory as it lies, so a tensor whose elements are not what lies there (lazily negated, sparse, a
    wrapper, one whose storage was freed) would give a wrong sum or a crash. Real dtypes have no conjugate bit,
    quantised tensors another dtype.
    """
    return (
        (type(tensor) in _PLAIN or _has_memory(tensor))
        and tensor.dtype is limits.dtype
        and tensor.layout is _STRIDED
        and tensor.is_cpu is on_cpu
        and (tensor.untyped_storage().nbytes() >= tensor.nbytes if on_cpu else tensor.device.type == limits.device)
        and tensor.is_contiguous()
        and not (tensor.requires_grad and torch.is_grad_enabled())
        # torch.compile cannot trace is_neg, and does not need it: torch negates before it runs an op of ours
        and ((not on_cpu and torch.compiler.is_compiling()) or not tensor.is_neg())
    )


def _has_memory(tensor: object) -> bool:
    """True for subclasses that only add names; False for wrappers (fake, distributed) that answer torch themselves."""
    ours = getattr(type(tensor), "__torch_dispatch__", None)
    return isinstance(tensor, torch.Tensor) and ours is torch.Tensor.__torch_dispatch__


def _is_number(value: object) -> bool:
    return isinstance(value, (float, int)) and not isinstance(value, bool)


def _tokens_within(limits: Limits, tokens: int) -> int:
    if tokens > limits.max_tokens:
        raise CapacityError(
            f"{limits.who()}: {tokens} tokens asked, prepared for at most {limits.max_tokens}; "
            f"prepare with max_tokens={tokens} or split the batch"
        )
    return tokens


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


def _complaint(
    limits: Limits, op: Op, tensors: tuple[tuple[str, object, int], ...], eps: object = 0.0, weight_bias: object = 0.0
) -> str:
    """The first thing that does not fit: what was given, what is allowed, what to do."""
    if op not in limits.ops:
        served = " and ".join(sorted(o.value for o in limits.ops))
        return f"{limits.who()}: {op.value} asked, prepared for {served} only; name it in ops= of prepare"
    for name, tensor, dims in tensors:
        trouble = _trouble(limits, name, tensor, dims)
        if trouble:
            return f"{limits.who()}: {trouble}"
    for name, value, lowest, form in (
        ("eps", eps, 0.0, "from 0 on"),
        ("weight_bias", weight_bias, -_LARGEST, "finite in fp32"),
    ):
        if not _is_number(value):
            return f"{limits.who()}: {name} is {value!r} ({type(value).__name__}), expected a number; pass a float"
        if not lowest <= value <= _LARGEST:  # type: ignore[operator] # a number, as was just asked
            return f"{limits.who()}: {name} is {value!r}, expected a number {form}"
    x, residual, weight = (tensor for _, tensor, _ in tensors)
    assert isinstance(x, torch.Tensor)
    assert isinstance(residual, torch.Tensor)
    assert isinstance(weight, torch.Tensor)
    if x.device != residual.device or x.device != weight.device:
        return f"{limits.who()}: x, residual and weight are on {x.device}, {residual.device} and {weight.device}"
    return f"{limits.who()}: residual has shape {list(residual.shape)}, x has {list(x.shape)}; they must be equal"


def _trouble(limits: Limits, name: str, tensor: object, dims: int) -> str:
    """What is wrong with one tensor by itself, or ''."""
    if not isinstance(tensor, torch.Tensor):
        return f"{name} is {'None' if tensor is None else f'a {type(tensor).__name__}'}, expected a tensor"
    if tensor.is_nested or tensor.layout is not _STRIDED:
        layout = "nested" if tensor.is_nested else str(tensor.layout)
        return f"{name} is a {layout} tensor, expected a plain strided one; pass {name}.to_dense()"
    if tensor.dtype is not limits.dtype:
        return f"{name} is {tensor.dtype}, prepared for {limits.dtype}; convert it"
    if tensor.device.type != limits.device:
        return f"{name} is on {tensor.device}, this workspace serves {limits.device}"
    if not _has_memory(tensor):
        return f"{name} is a {type(tensor).__name__}, which has no memory of its own; pass the plain tensor inside it"
    if tensor.dim() != dims or tensor.shape[-1] != limits.hidden:
        form = f"[tokens, {limits.hidden}]" if dims == 2 else f"[{limits.hidden}]"
        return f"{name} has shape {list(tensor.shape)}, expected {form}"
    if not tensor.is_contiguous():
        return (
            f"{name} of shape {list(tensor.shape)} has strides {tensor.stride()}, which is not contiguous; "
            f"pass {name}.contiguous()"
        )
    if tensor.is_cpu and tensor.untyped_storage().nbytes() < tensor.nbytes:
        return (
            f"{name} needs {tensor.nbytes} bytes, and its storage was cut to {tensor.untyped_storage().nbytes()}, as "
            f"FSDP does with parameters that it has freed; call it while they are gathered"
        )
    if tensor.is_neg():
        return f"{name} is a lazy negation, whose memory holds the opposite sign; pass {name}.resolve_neg()"
    if torch.is_grad_enabled() and tensor.requires_grad:
        return (
            f"{name} requires grad, and no gradient flows through this collective; pass {name}.detach(), or call it "
            f"under torch.no_grad()"
        )
    return ""
