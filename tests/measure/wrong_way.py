"""A rank that measures while some sums lack the last member. Started under torchrun by test_commands.py.

First argument: "peer" for gloo alone; "ours" for gloo as the only path there is, so that it is ours.
"""

from __future__ import annotations

import sys

from workbench.backends import gloo, shm
from workbench.backends.base import Verdict
from workbench.cli import cli

if sys.argv[1] == "ours":
    shm.probe = lambda *_: Verdict(False, "switched off by this test")
_right_sum, _right_fused = gloo._sum, gloo._fused
gloo._sum = lambda contributions: _right_sum(contributions[:-1])
gloo._fused = lambda contributions, *rest: _right_fused(contributions[:-1], *rest)
cli.main(["measure", "fused", *sys.argv[2:]], standalone_mode=False)
