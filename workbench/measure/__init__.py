"""Timing method and the peers to time beside: live, side by side, after a correctness check."""

from workbench.measure.subgroups import time_subgroups
from workbench.measure.timing import alternate
from workbench.measure.unfused import Unfused

__all__ = ["Unfused", "alternate", "time_subgroups"]
