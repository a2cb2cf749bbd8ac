"""ROCm/aiter#2075, sgl-project/sglang#27948 and #28672.

Symptom: graph capture fails, or replays garbage, when a memory saver is hooked in. Cause: it replaces the allocator
under the library, and asking for a handle of such memory gives junk and no error. Modelled on facts that change; on
real ranks with memory that the workspace did not hand out.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from tests.bugs.worlds import HIDDEN, only, open_session
from tests.forked import run_ranks
from workbench.fabric import Allocator, Capability, Fabric, decide_capability, simulated
from workbench.ranks import GroupKey, GroupMap


def _fabric(kind: Allocator) -> Fabric:
    machine = simulated("h200x2")
    return Fabric(GroupKey("tp", (0, 1)), tuple(replace(machine.facts_of(r), allocator=kind) for r in range(2)))


def test_old_a_handle_is_read_out_of_memory_that_has_none() -> None:
    handles = {0x1000: "handle of 0x1000"}  # of what the library's own allocator gave out

    def ipc_handle(address: int) -> str:
        return handles.get(address, "junk")  # no error

    hooked_allocation = 0x9000
    assert ipc_handle(hooked_allocation) == "junk"


def test_asked_again_after_the_swap_the_zero_copy_is_gone_and_the_staged_path_is_not() -> None:
    before, after = _fabric(Allocator.PLAIN), _fabric(Allocator.NONE)
    assert decide_capability(before, Capability.GRAPH_ZERO_COPY_IPC).ok
    assert decide_capability(after, Capability.GRAPH_ZERO_COPY_IPC).reason == (
        "world ranks 0, 1: the allocator's memory is none, not plain"
    )
    assert decide_capability(after, Capability.STAGED).ok


def test_memory_of_a_foreign_allocator_is_captured_through_the_workspaces_own() -> None:
    def body(rank: int) -> list[float]:
        with open_session(GroupMap.custom({"tp": [[0, 1]]}), "tp") as s:
            foreign = np.full((1, HIDDEN), 10.0**rank, dtype=np.float32)
            x = torch.from_numpy(foreign)
            with s.capture() as c:
                out = s.all_reduce(x, group="tp")
            c.replay()
            first = only(out)
            foreign *= 3
            c.replay()
            return [first, only(out)]

    assert run_ranks(2, body) == [[11.0, 33.0]] * 2
