"""sgl-project/sglang#25649.

Symptom: custom all-reduce breaks in graph capture on boxes without full NVLink; a later repair switched it off there
altogether, which is slow. Cause: two implementations; the probe's result picked one, and the capture state went to the
other. Modelled on a simulated machine and with the paths there are on CPU.
"""

from __future__ import annotations

import pytest

from tests.bugs.worlds import fused, only, open_session, part
from tests.forked import run_ranks
from workbench.fabric import Capability, Fabric, decide_capability, simulated
from workbench.ranks import GroupKey, GroupMap


def test_old_the_capture_state_goes_to_the_implementation_that_was_not_chosen() -> None:
    class Implementation:
        def __init__(self) -> None:
            self.capturing, self.registered = False, 0

        def all_reduce(self) -> None:
            self.registered += self.capturing

    custom, fallback = Implementation(), Implementation()

    def choose(full_nvlink: bool) -> Implementation:
        return custom if full_nvlink else fallback

    custom.capturing = True  # the graph runner holds this one
    choose(full_nvlink=False).all_reduce()
    assert (custom.registered, fallback.registered) == (0, 0)  # the captured call has registered its buffer nowhere


@pytest.mark.parametrize(("fusion", "path"), [("1", "shm"), ("0", "gloo")])
def test_whichever_path_is_chosen_it_alone_is_captured_and_replayed(
    monkeypatch: pytest.MonkeyPatch, fusion: str, path: str
) -> None:
    monkeypatch.setenv("WORKBENCH_FUSION", fusion)

    def body(rank: int) -> tuple[str, list[str], float, float]:
        with open_session(GroupMap.custom({"tp": [[0, 1]]}), "tp") as s:
            with s.capture() as c:
                out, total = fused(s, "tp"), s.all_reduce(part(rank), group="tp")
            c.replay()
            return s.why("tp").choice, [call.path for call in c.calls], only(out.residual), only(total)

    assert run_ranks(2, body) == [(path, [path, path], 16.0, 11.0)] * 2


def test_without_nvlink_between_all_a_pair_keeps_the_capability_and_four_get_the_reason() -> None:
    machine = simulated("pcie-pairs")

    def verdict(*ranks: int) -> tuple[bool, str]:
        fabric = Fabric(GroupKey("tp", ranks), tuple(machine.facts_of(r) for r in ranks))
        found = decide_capability(fabric, Capability.GRAPH_ZERO_COPY_IPC)
        return found.ok, found.reason

    assert verdict(0, 1)[0]
    assert verdict(0, 1, 2, 3) == (False, "world ranks 0, 2 of node0 are not connected by NVLink")
