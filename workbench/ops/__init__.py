"""The fused operation: description, torch reference and numerical contract. No process group, no device call."""

from workbench.ops.fused import ALL, DTYPES, FusedOutput, Op, Rounding

__all__ = ["ALL", "DTYPES", "FusedOutput", "Op", "Rounding"]
