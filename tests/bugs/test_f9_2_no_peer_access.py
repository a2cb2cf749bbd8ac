"""sgl-project/sglang#4814, #1509 and #552.

Symptom: "peer access is not supported between these two devices" ends the start, on consumer cards, old cards and cloud
machines. Cause: peer access was enabled without asking first. Modelled on a driver that offers none.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.bugs.fake_driver import DEVICES, FakeDriver
from workbench.fabric import Capability, Fabric, Outcome, Trial, decide_capability, simulated
from workbench.plan import Ask, decide_path
from workbench.ranks import GroupKey
from workbench.runtime.cuda_probe import ProbeError, probe_peer_access


def test_old_enabling_what_is_not_there_is_a_crash() -> None:
    offers_peer_access = False

    def enable_peer_access() -> None:
        if not offers_peer_access:
            raise RuntimeError("peer access is not supported between these two devices")

    with pytest.raises(RuntimeError):
        enable_peer_access()


def test_the_probe_asks_first_and_the_group_falls_back_with_the_reason() -> None:
    with pytest.raises(ProbeError) as e:
        probe_peer_access(FakeDriver(offers=False), *DEVICES)
    assert str(e.value) == "the driver offers no peer access"
    refused = Trial(Outcome.FAILS, str(e.value))
    pair = tuple(simulated("h200x2").facts_of(r) for r in range(2))
    pair = tuple(replace(f, links=tuple(replace(k, peer_access=refused, ipc=refused) for k in f.links)) for f in pair)
    fabric = Fabric(GroupKey("tp", (0, 1)), pair)
    reason = "peer access from world rank 0 to world rank 1 fails (the driver offers no peer access)"
    assert [decide_capability(fabric, c).ok for c in Capability] == [False] * 4
    plan = decide_path(fabric, Ask(hidden=4096, tokens=8))
    assert plan.choice == "nccl"
    assert dict(plan.rejected) == dict.fromkeys(("custom.fused", "custom"), reason)
