"""A short run of the CUDA kernels with virtual ranks on one GPU, small enough for compute-sanitizer.

compute-sanitizer --tool memcheck python3 tests/kernels_cuda/virtual_small.py [LIBRARY] [--short]
"""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from cuda_kernels import Checks, Ours, abi, check_call  # noqa: E402 - after the path


def main() -> int:
    short, library = "--short" in sys.argv, next((a for a in sys.argv[1:] if a != "--short"), None)
    if library is None:
        from workbench.backends.custom_build import build_cuda

        library = build_cuda("{}{}a".format(*torch.cuda.get_device_capability()))
    kernels, checks, seed = abi.Kernels(library), Checks(), 0
    dtypes = ((torch.bfloat16, 2880), (torch.float16, 8), (torch.float32, 520))
    for ranks in (2, 5) if short else (2, 3, 4, 8):
        for dtype, hidden in dtypes[:2] if short else dtypes:
            ours = Ours(kernels, ranks=ranks, rank=0, hidden=hidden, dtype=dtype, capacity=9)
            for tokens in (1, 9, 2) if short else (1, 9, 2, 0, 5):
                for choice in (
                    abi.choose(tokens, hidden, dtype.itemsize, ranks),
                    abi.Choice(2),
                    abi.Choice(2, algorithm=abi.TWO_SHOT_PUSH),
                ):
                    for kind in ("bits", "normal") if tokens else ("normal",):
                        seed += 1
                        check_call(checks, ours, choice, kind, tokens, seed, what=f"{ranks} ranks {dtype}")
                check_call(checks, ours, choice, "integers", tokens, seed, what=f"{ranks} ranks sum", reduce=True)
            ours.free()
    print(f"{checks.done} checks, wrong: {checks.wrong[:5]}")
    return 1 if checks.wrong or not checks.done else 0


if __name__ == "__main__":
    sys.exit(main())
