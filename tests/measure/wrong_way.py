"""A rank that measures while one peer's sums lack the last member. Started under torchrun by test_commands.py."""

from __future__ import annotations

import sys

from workbench.backends import gloo
from workbench.cli import cli

_right_sum, _right_fused = gloo._sum, gloo._fused
gloo._sum = lambda contributions: _right_sum(contributions[:-1])
gloo._fused = lambda contributions, *rest: _right_fused(contributions[:-1], *rest)
cli.main(["measure", "fused", *sys.argv[1:]], standalone_mode=False)
