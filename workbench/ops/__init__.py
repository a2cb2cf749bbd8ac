"""The fused operation: description, torch reference and numerical contract. No process group, no device call."""

from workbench.ops.checks import Limits, check_all_reduce, check_empty, check_fused
from workbench.ops.fused import ALL, DTYPES, FusedOutput, Op, Rounding
from workbench.ops.partial import Partial, ReduceOver
from workbench.ops.quant import Quant, QuantKind, check_quant, quantise
from workbench.ops.reference import (
    add_rms_norm,
    reference_all_reduce,
    reference_all_reduce_add_rms_norm,
    round_to,
    sum_fp32,
)

__all__ = [
    "ALL",
    "DTYPES",
    "FusedOutput",
    "Limits",
    "Op",
    "Partial",
    "Quant",
    "QuantKind",
    "ReduceOver",
    "Rounding",
    "add_rms_norm",
    "check_all_reduce",
    "check_empty",
    "check_fused",
    "check_quant",
    "quantise",
    "reference_all_reduce",
    "reference_all_reduce_add_rms_norm",
    "round_to",
    "sum_fp32",
]
