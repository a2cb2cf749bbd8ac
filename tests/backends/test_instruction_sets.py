"""Pins that every way to compile the arithmetic gives the reference's bits: the widest registers here, AVX2, and plain.

One rank is enough: the sum of one is the identity, so all that is left is loading, adding, rounding and normalising.
"""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from tests.backends.ranks import bits, data, request
from workbench.backends import build
from workbench.backends.shm import ShmWorkspace
from workbench.ops import Rounding, reference_all_reduce, reference_all_reduce_add_rms_norm
from workbench.ranks import GroupKey

HIDDEN = 4096


class Alone:
    key = GroupKey("tp", (0,))
    world_rank = 0
    timeout_s = 1.0


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """All 65536 values of a 16-bit dtype; for fp32 as many, over all exponents."""
    counted = torch.arange(-0x8000, 0x8000, dtype=torch.int32)
    if dtype.itemsize == 2:
        return counted.to(torch.int16).view(dtype).reshape(-1, HIDDEN)
    return ((counted << 16) ^ (counted * 40503 & 0xFFFF)).view(torch.float32).reshape(-1, HIDDEN)


def check_arithmetic(path: Path) -> None:
    """Compare the kernels in the object at `path` with the reference."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = every_value(dtype)
        residual = x.flatten().roll(7919).reshape(-1, HIDDEN).contiguous()
        weight = data(3, (HIDDEN,), dtype)
        normal = data(4, (3, HIDDEN), dtype)
        for rounding in Rounding:
            wanted = request(HIDDEN, dtype, max_tokens=64, rounding=rounding)
            workspace = ShmWorkspace(Alone(), wanted, path, None, [], [])  # type: ignore[arg-type]
            assert torch.equal(bits(workspace.all_reduce(x)), bits(reference_all_reduce([x])))
            out = workspace.all_reduce_add_rms_norm(x, residual, weight, eps=1e-6, weight_bias=1.0)
            expected = reference_all_reduce_add_rms_norm([x], residual, weight, eps=1e-6, rounding=rounding)
            assert torch.equal(bits(out.residual), bits(expected.residual))
            out = workspace.all_reduce_add_rms_norm(normal, normal, weight, eps=1e-6, weight_bias=1.0)
            expected = reference_all_reduce_add_rms_norm(
                [normal], normal, weight, eps=1e-6, weight_bias=1.0, rounding=rounding
            )
            apart = (bits(out.norm).int() - bits(expected.norm).int()).abs().max().item()
            assert apart <= (1 if dtype.itemsize == 2 else 32)
            workspace.close()


def flag_sets() -> dict[str, list[str]]:
    sets = {"native": ["-march=native"]}
    if platform.machine() == "x86_64":
        sets["plain"] = ["-march=x86-64"]
        features = Path("/proc/cpuinfo").read_text()
        if " avx2 " in features and " f16c " in features:
            sets["avx2"] = ["-march=haswell"]
        if " avx512bw " in features and " avx512dq " in features:
            sets["avx512 without bf16"] = ["-march=skylake-avx512"]
    return sets


@pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler here")
@pytest.mark.parametrize("name", flag_sets())
def test_arithmetic_is_the_references(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plain = tuple(flag for flag in build.FLAGS if flag != "-march=native")
    monkeypatch.setattr(build, "FLAGS", (*plain, *flag_sets()[name]))
    build._key.cache_clear()
    try:
        check_arithmetic(build.build_cpu())
    finally:
        build._key.cache_clear()
