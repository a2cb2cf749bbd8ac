"""What each rank does on its GPU under torchrun: the same checks as on CPU ranks, and a CUDA graph.

World rank 0's last line says how many checks passed.
"""

import os

import pytest
import torch

from workbench import GroupMap, Session
from workbench.errors import CaptureError
from workbench.ops import Rounding, reference_all_reduce_add_rms_norm
from workbench.runtime.devices import take_gpu

HIDDEN = 2880
EPS = 1e-6


def main() -> None:
    """Run the checks; any failure ends the rank with a traceback."""
    take_gpu()
    world = int(os.environ["WORLD_SIZE"])
    checked = 0
    with Session(GroupMap.build("sglang", tp=world), device="cuda", timeout_s=60) as s:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for rounding in ("once", "twice"):
                s.prepare("tp", hidden=HIDDEN, dtype=dtype, max_tokens=64, rounding=rounding)
                for tokens in (0, 1, 7, 64):
                    check_bits(s, tokens, dtype, rounding)
                    checked += 1
        check_capture(s)
        checked += 1
        rank = s.world_rank
        path = s.why("tp").choice
    with Session(GroupMap.build("sglang", tp=world), device="cuda", timeout_s=60) as s:
        s.prepare("tp", hidden=HIDDEN, dtype=torch.bfloat16, max_tokens=64)
        s.freeze()
        check_bits(s, 100, torch.bfloat16, "once")
        s.check()
        check_bits(s, 7, torch.bfloat16, "once")
        checked += 1
    if rank == 0:
        print(f"{checked} checks on {world} ranks over {path}")


def check_bits(s: Session, tokens: int, dtype: torch.dtype, rounding: str) -> None:
    """Residual bits equal those of the CPU reference on every rank."""
    parts = [_random((tokens, HIDDEN), r, dtype) for r in s.group("tp").world_ranks]
    residual, weight = _random((tokens, HIDDEN), 99, dtype), _random((HIDDEN,), 98, dtype)
    wanted = reference_all_reduce_add_rms_norm(parts, residual, weight, eps=EPS, rounding=Rounding(rounding))
    out = s.all_reduce_add_rms_norm(parts[s.world_rank].cuda(), residual.cuda(), weight.cuda(), eps=EPS, group="tp")
    assert torch.equal(out.residual.cpu(), wanted.residual), (tokens, dtype, rounding)
    assert torch.allclose(out.norm.cpu().float(), wanted.norm.float(), rtol=4 * torch.finfo(dtype).eps, atol=1e-6)


def check_capture(s: Session) -> None:
    """A CUDA graph computes what its inputs hold at each replay; nothing else collective may happen inside."""
    s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=64)
    world = s.group_map.world_size
    x = torch.zeros(4, HIDDEN, device="cuda")
    residual, weight = torch.full_like(x, 5), torch.ones(HIDDEN, device="cuda")
    with s.capture() as c:
        out = s.all_reduce_add_rms_norm(x, residual, weight, eps=EPS, group="tp")
        with pytest.raises(CaptureError, match="barrier"):
            s.barrier(group="tp")
    for scale in (1.0, 3.0, 0.5):
        x.fill_(scale * 2.0**s.world_rank)
        c.replay()
        torch.cuda.synchronize()
        assert out.residual.unique().tolist() == [scale * (2.0**world - 1) + 5]


def _random(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


if __name__ == "__main__":
    main()
