"""A rank that measures with one more backend, whose sums lack the last member. Started by test_commands.py."""

from __future__ import annotations

import sys
from types import ModuleType

from workbench.backends import gloo
from workbench.backends.base import Channel, Request
from workbench.backends.gathered import Arithmetic, GatheredWorkspace
from workbench.cli import cli
from workbench.ops import add_rms_norm, round_to, sum_fp32
from workbench.plan import CANDIDATES


def bind(channel: Channel, request: Request) -> GatheredWorkspace:
    def fused(contributions, residual, weight, eps, weight_bias, rounding):
        total = sum_fp32(contributions[:-1])
        return add_rms_norm(total, residual, weight, eps=eps, weight_bias=weight_bias, rounding=rounding)

    def total(contributions):
        return round_to(sum_fp32(contributions[:-1]), contributions[0].dtype)

    return GatheredWorkspace("short_sum", channel, request, Arithmetic(total, fused))


backend = ModuleType("workbench.backends.short_sum")
vars(backend).update(NAME="short_sum", probe=gloo.probe, bind=bind)
sys.modules[backend.__name__] = backend
CANDIDATES["cpu"] = (*CANDIDATES["cpu"], "short_sum")
cli.main(["measure", "fused", *sys.argv[1:]], standalone_mode=False)
