"""First calls that prove a library's path before anyone relies on it: right members, and the declared rounding.

A library may change its arithmetic between versions. So a path that declares a rounding class shows it at bind: on
whole numbers that tell the members apart, and on normal numbers whose bits each member computes alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from workbench.backends.base import Channel, Request
from workbench.errors import ResourceError
from workbench.ops import FusedOutput, Op, reference_all_reduce, reference_all_reduce_add_rms_norm

EPS = 1e-6


def prove_calls(
    channel: Channel,
    request: Request,
    *,
    tokens: int,
    reduce: Callable[[torch.Tensor], torch.Tensor],
    fuse: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], FusedOutput],
    device: str = "cuda",
) -> None:
    """Run both operations that were asked for on `tokens` rows and compare them with the contract.

    `fuse` takes x, residual and weight, and uses EPS. Bits of sums and residuals must be equal; the norm may differ in
    its last bits, since the order of its mean is free.
    Collective: every member calls it. To be run inside a vote.
    Raises: ResourceError for a wrong sum, another rounding, or a call that does not end within the channel's timeout.
    """
    place = channel.key.group_rank(channel.world_rank)
    for name, parts, residual, weight in _cases(channel.key.size, tokens, request):
        mine, residual_gpu, weight_gpu = parts[place].to(device), residual.to(device), weight.to(device)
        if Op.ALL_REDUCE in request.ops:
            total = reduce(mine)
            _wait_for(total, channel, f"a first sum of {name}")
            _compare(f"a first sum of {name}", total, reference_all_reduce(parts), request)
        if Op.ALL_REDUCE_ADD_RMS_NORM in request.ops:
            out = fuse(mine, residual_gpu, weight_gpu)
            _wait_for(out.residual, channel, f"a first fused call on {name}")
            want = reference_all_reduce_add_rms_norm(parts, residual, weight, eps=EPS, rounding=request.rounding)
            _compare(f"a first residual of {name}", out.residual, want.residual, request)
            tolerance = 4 * torch.finfo(request.dtype).eps
            if not torch.allclose(out.norm.cpu().float(), want.norm.float(), rtol=tolerance, atol=tolerance):
                worst = (out.norm.cpu().float() - want.norm.float()).abs().max().item()
                raise ResourceError(f"a first norm of {name} is off by up to {worst:g}; {tolerance:g} is allowed")


def _cases(
    size: int, tokens: int, request: Request
) -> list[tuple[str, Sequence[torch.Tensor], torch.Tensor, torch.Tensor]]:
    """(name, every member's x, residual, weight), on the CPU and alike on every member."""
    shape = (tokens, request.hidden)
    whole = [_full(shape, r + 1.0, request.dtype) for r in range(size)]
    normal = [_normal(shape, seed, request.dtype) for seed in range(size + 1)]
    weight = _normal(shape[1:], size + 1, request.dtype)
    return [
        ("whole numbers", whole, _full(shape, 3.0, request.dtype), _full(shape[1:], 1.0, request.dtype)),
        ("normal numbers", normal[:size], normal[size], weight),
    ]


def _wait_for(result: torch.Tensor, channel: Channel, what: str) -> None:
    """Return when the current stream of the result's GPU has done its work.

    Raises: ResourceError past the channel's timeout. A kernel that waits without bound for a peer then still runs, and
    only the end of the process ends it.
    """
    if not result.is_cuda:
        return
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch has no types here
    event.record()
    deadline = time.monotonic() + channel.timeout_s
    while not event.query():
        if time.monotonic() > deadline:
            raise ResourceError(
                f"{what} did not end within {channel.timeout_s:g} s; its kernel waits for a peer without bound, so end "
                f"this job and look at the other members"
            )
        time.sleep(50e-6)


def _full(shape: tuple[int, ...], value: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, value, dtype=dtype, device="cpu")


def _normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)


def _compare(what: str, got: torch.Tensor, want: torch.Tensor, request: Request) -> None:
    differs = (got.cpu() != want).flatten()
    wrong = int(differs.sum())
    if wrong:
        first = int(differs.nonzero()[0])
        raise ResourceError(
            f"{what}: {wrong} of {want.numel()} elements differ from rounding={request.rounding.value}; element "
            f"{first} is {got.flatten()[first].item()} and not {want.flatten()[first].item()}"
        )
