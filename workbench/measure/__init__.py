"""Timing method and the ways to time beside: live, side by side, after a correctness check; and the cost model."""

from workbench.measure.about import count_cores, describe_device
from workbench.measure.case import Case, Gives, Work, check_case
from workbench.measure.fused import known_ways, measure_fused
from workbench.measure.library import NO_MULTICAST
from workbench.measure.losses import Loss, Losses, find_losses, require_same
from workbench.measure.roofline import (
    Published,
    Rates,
    find_crossover,
    find_rates,
    fit_line,
    link_bytes,
    memory_bytes,
    predict_us,
    published_figures,
    simulate_us,
)
from workbench.measure.spec import FusedSpec
from workbench.measure.subgroups import time_subgroups
from workbench.measure.timing import SessionMeeting, alternate
from workbench.measure.tuned import NothingWonError, tuned_table
from workbench.measure.unfused import Steps, Unfused
from workbench.measure.virtual_ranks import VirtualRun, check_virtual_ranks, recorded_virtual_run

__all__ = [
    "NO_MULTICAST",
    "Case",
    "FusedSpec",
    "Gives",
    "Loss",
    "Losses",
    "NothingWonError",
    "Published",
    "Rates",
    "SessionMeeting",
    "Steps",
    "Unfused",
    "VirtualRun",
    "Work",
    "alternate",
    "check_case",
    "check_virtual_ranks",
    "count_cores",
    "describe_device",
    "find_crossover",
    "find_losses",
    "find_rates",
    "fit_line",
    "known_ways",
    "link_bytes",
    "measure_fused",
    "memory_bytes",
    "predict_us",
    "published_figures",
    "recorded_virtual_run",
    "require_same",
    "simulate_us",
    "time_subgroups",
    "tuned_table",
]
