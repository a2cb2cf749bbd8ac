"""gpustack/gpustack#4072, vllm-project/vllm#6385, local-inference-lab/b12x#410.

Symptom: TP 3 is slow without a word, or refused. Cause: kernels for 2, 4, 6 and 8 ranks, sometimes 16, and an early
return for everything else.
"""

from __future__ import annotations

import pytest
import torch

from tests.bugs.worlds import HIDDEN, fused, only, open_session
from tests.forked import run_ranks
from workbench.fabric import Fabric, simulated
from workbench.plan import Ask, Plan, decide_path
from workbench.ranks import GroupKey, GroupMap

NOT_ON_HOPPER = "no width from nine to fifteen was tuned on Hopper, whose hosts join eight GPUs by NVLink"
NOT_IN_A_CLIQUE = (
    "no width from nine to fifteen was tuned: above one host of eight only the whole clique of sixteen was"
)


def _plan(machine: str, ranks: int) -> Plan:
    place = simulated(machine)
    fabric = Fabric(GroupKey("tp", tuple(range(ranks))), tuple(place.facts_of(r) for r in range(ranks)))
    return decide_path(fabric, Ask(hidden=7168, tokens=8))


def test_old_three_ranks_get_neither_kernel_nor_reason() -> None:
    def custom_all_reduce(world_size: int) -> str | None:
        return "custom" if world_size in (2, 4, 6, 8) else None

    assert [custom_all_reduce(n) for n in (3, 5, 6, 12, 16)] == [None, None, "custom", None, None]


@pytest.mark.parametrize(
    ("machine", "ranks", "choice", "why_not_custom"),
    [
        ("h100x8", 3, "custom.fused.push", ""),
        ("h100x8", 5, "custom.fused.push", ""),
        ("h100x8", 6, "custom.fused.two_shot_push", ""),
        ("ib-2x8", 12, "nccl", f"table sm90 has no width 12 ({NOT_ON_HOPPER}); it has 2, 3, 4, 5, 6, 7, 8"),
        ("ib-2x8", 16, "nccl", "table sm90 has no width 16"),
        ("b200x8", 3, "custom.fused.push", ""),
        ("b200x8", 5, "custom.fused.push", ""),
        ("b200x8", 6, "custom.fused.two_shot_push", ""),
        ("gb200-4x4", 12, "nccl", f"table sm100 has no width 12 ({NOT_IN_A_CLIQUE}); it has 2, 3, 4, 5, 6, 7, 8, 16"),
        ("gb200-4x4", 16, "custom.fused.two_shot_push", ""),
    ],
)
def test_every_width_has_a_path_and_a_missing_one_a_reason(machine, ranks, choice, why_not_custom: str) -> None:
    plan = _plan(machine, ranks)
    assert plan.choice == choice
    assert dict(plan.rejected).get("custom.fused", "").startswith(why_not_custom)
    assert "\n" not in str(plan)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_three_real_ranks_are_right_on_the_fused_path_and_on_the_fallback(backend: str) -> None:
    def body(rank: int) -> tuple[str, float]:
        with open_session(GroupMap.build("sglang", tp=3)) as s:
            plan = s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=4, backend=backend)
            return plan.choice, only(fused(s, "tp").residual)

    assert run_ranks(3, body) == [(backend, 116.0)] * 3
