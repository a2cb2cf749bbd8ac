"""A rank that measures beside a gloo path with a fault. Started under torchrun by test_commands.py.

First argument: "peer" or "ours" for sums that lack the last member, "slow peer" or "slow ours" for calls that sleep;
gloo is ours where it is the only path there is. The rest is the command.
"""

from __future__ import annotations

import sys
import time

from workbench.backends import gloo, shm
from workbench.backends.base import Verdict
from workbench.cli import cli

fault = sys.argv[1]
if "ours" in fault:
    shm.probe = lambda *_: Verdict(False, "switched off by this test")
_right_sum, _right_fused = gloo._sum, gloo._fused


def _parts(contributions):
    if "slow" not in fault:
        return contributions[:-1]
    time.sleep(0.2)
    return contributions


gloo._sum = lambda contributions: _right_sum(_parts(contributions))
gloo._fused = lambda contributions, *rest: _right_fused(_parts(contributions), *rest)
cli.main(sys.argv[2:], standalone_mode=False)
