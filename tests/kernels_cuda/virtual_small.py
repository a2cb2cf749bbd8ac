"""A short run of the CUDA kernels with virtual ranks on one GPU, small enough for compute-sanitizer.

compute-sanitizer --tool memcheck python3 tests/kernels_cuda/virtual_small.py [LIBRARY]
"""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from cuda_checks import Checks, Ours, abi, check_call  # noqa: E402 - after the path


def main() -> int:
    if len(sys.argv) > 1:
        library = sys.argv[1]
    else:
        from workbench.backends.custom_build import build_cuda

        library = build_cuda("{}{}a".format(*torch.cuda.get_device_capability()))
    kernels, checks, seed = abi.Kernels(library), Checks(), 0
    for ranks in (2, 3, 4, 8):
        for dtype, hidden in ((torch.bfloat16, 2880), (torch.float16, 8), (torch.float32, 520)):
            ours = Ours(kernels, ranks=ranks, rank=0, hidden=hidden, dtype=dtype, capacity=9)
            for tokens in (1, 9, 2, 0, 5):
                for choice in (abi.choose(tokens, hidden, dtype.itemsize), abi.Choice(2)):
                    for kind in ("bits", "normal") if tokens else ("normal",):
                        seed += 1
                        check_call(checks, ours, choice, kind, tokens, seed, what=f"{ranks} ranks {dtype}")
                check_call(checks, ours, choice, "integers", tokens, seed, what=f"{ranks} ranks sum", reduce=True)
            ours.free()
    print(f"{checks.done} checks, wrong: {checks.wrong[:5]}")
    return 1 if checks.wrong or not checks.done else 0


if __name__ == "__main__":
    sys.exit(main())
