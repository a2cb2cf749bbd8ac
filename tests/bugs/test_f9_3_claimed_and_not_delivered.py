"""vllm-project/vllm#51513, #7588 and #4992.

Symptom: the driver says that peer access works, and data never arrives; a hang. Cause: a capability is not a test of
the path: an IOMMU or access control swallows the writes. An older test said yes always, as its copy went through the
host. Modelled on a driver that loses peer writes.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bugs.fake_driver import DEVICES, FakeDriver
from workbench.fabric import Capability, Fabric, Outcome, Trial, decide_capability, simulated
from workbench.plan import Ask, decide_path
from workbench.ranks import GroupKey
from workbench.runtime.cuda_probe import SEEDED, ProbeError, probe_peer_access
from workbench.runtime.probe import run_steps

PAIR = tuple(simulated("h200x2").facts_of(r) for r in range(2))


def _vetoed(reason: str) -> Fabric:
    """The pair, where one direction of one link failed for `reason`."""
    bad = Trial(Outcome.FAILS, reason)
    first = replace(PAIR[0], links=tuple(replace(link, peer_access=bad) for link in PAIR[0].links))
    return Fabric(GroupKey("tp", (0, 1)), (first, PAIR[1]))


def test_old_a_copy_through_the_host_says_yes_of_a_link_that_loses_everything() -> None:
    driver = FakeDriver(lost=True)
    with driver.memory(DEVICES[1]) as theirs:
        driver.require(DEVICES[1], theirs, SEEDED, "copied")  # no error


def test_a_working_link_passes_and_one_that_loses_writes_is_found_out() -> None:
    probe_peer_access(FakeDriver(), *DEVICES)
    with pytest.raises(ProbeError) as e:
        probe_peer_access(FakeDriver(lost=True), *DEVICES)
    assert str(e.value) == "written to the other's memory: 256 of 256 words are others"


def test_a_probe_that_hangs_is_ended_at_its_deadline_and_the_others_are_still_asked(tmp_path: Path) -> None:
    program = tmp_path / "probe.py"
    program.write_text(
        "import json, sys, time\n"
        "for step in sys.argv[2:]:\n"
        "    if step.startswith('peer_access'):\n"
        "        time.sleep(60)\n"
        "    print(json.dumps({'step': step, 'outcome': 'works'}), flush=True)\n"
    )
    started = time.monotonic()
    told = run_steps("GPU-0", ["peer_access:GPU-1", "ipc:GPU-1"], 1.0, program=str(program))
    assert {step: (answer["outcome"], answer["reason"]) for step, answer in told.items()} == {
        "peer_access:GPU-1": ("fails", "no answer within 1 s"),
        "ipc:GPU-1": ("works", ""),
    }
    assert time.monotonic() - started < 12


@pytest.mark.parametrize("reason", ["256 of 256 words are others", "no answer within 1 s"])
def test_one_direction_of_one_link_vetoes_every_use_of_peer_memory(reason: str) -> None:
    fabric = _vetoed(reason)
    assert [decide_capability(fabric, c).ok for c in Capability] == [False] * 4
    plan = decide_path(fabric, Ask(hidden=4096, tokens=8))
    assert plan.choice == "nccl"
    assert dict(plan.rejected)["custom"] == f"peer access from world rank 0 to world rank 1 fails ({reason})"
