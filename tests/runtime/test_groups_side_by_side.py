"""Pins that the groups of a layout need nothing of each other: one group stands still, all others prepare, run and end.

The last world rank holds back until every rank outside its group has prepared, made all its calls and left a mark. Were
a rendezvous, a buffer or a count shared between groups, the others would wait for it, and the deadline would tell.
World rank r contributes 10^r (2^r on eight ranks) and the residual is 5: the digits say who was summed.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tests.forked import run_ranks
from workbench.ranks import GroupMap
from workbench.runtime import Session

HIDDEN, CALLS = 16, 5
LAYOUTS = {
    "DP2xTP2": (GroupMap.build("vllm", tp=2, dp=2), "tp", [16, 16, 1105, 1105]),
    "PP2xTP2": (GroupMap.build("vllm", tp=2, pp=2), "tp", [16, 16, 1105, 1105]),
    "CP2xTP2": (GroupMap.build("sglang", tp=4, attn_cp=2), "attention_tp", [16, 16, 1105, 1105]),
    "TP2xCP2 across": (GroupMap.build("sglang", tp=4, attn_cp=2), "attn_cp", [106, 1015, 106, 1015]),
    "EP2xTP2": (GroupMap.build("sglang", tp=4, moe_ep=2), "moe_tp", [16, 16, 1105, 1105]),
    "EP2xTP2 across": (GroupMap.build("sglang", tp=4, moe_ep=2), "moe_ep", [106, 1015, 106, 1015]),
}
EIGHT = GroupMap.build("sglang", tp=8, attn_dp=2, attn_cp=2)
EIGHT_SUMS = {  # [0,1] [2,3] [4,5] [6,7], and [0,2] [1,3] [4,6] [5,7], each with the residual of 5
    "attention_tp": [8, 8, 17, 17, 53, 53, 197, 197],
    "attn_cp": [10, 15, 10, 15, 85, 165, 85, 165],
}


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_groups_of_four_ranks_do_not_wait_for_a_group_that_stands_still(
    name: str, backend: str, tmp_path: Path
) -> None:
    group_map, kind, sums = LAYOUTS[name]

    def body(rank: int) -> list[float]:
        return _run(group_map, (kind,), backend, 10.0**rank, tmp_path)[kind]

    assert run_ranks(4, body) == [[float(total)] * CALLS for total in sums]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_two_kinds_of_groups_of_eight_ranks_with_one_rank_late(backend: str, tmp_path: Path) -> None:
    def body(rank: int) -> dict[str, list[float]]:
        return _run(EIGHT, ("attention_tp", "attn_cp"), backend, 2.0**rank, tmp_path)

    found = run_ranks(8, body)
    for kind, sums in EIGHT_SUMS.items():
        assert [found[rank][kind] for rank in range(8)] == [[float(total)] * CALLS for total in sums], kind


def _run(group_map: GroupMap, kinds: tuple[str, ...], backend: str, part: float, marks: Path) -> dict[str, list[float]]:
    """Every kind prepared and called CALLS times; the last world rank starts when all outside its groups are done."""
    found = {}
    with Session(group_map, device="cpu", timeout_s=20) as s:
        late = group_map.world_size - 1
        if s.world_rank == late:
            held = {late}  # and whoever shares a group with one of these waits for the last rank too
            for _ in kinds:
                held |= {r for kind in kinds for member in held for r in group_map.group_of(kind, member).world_ranks}
            _wait_for(marks, [r for r in range(group_map.world_size) if r not in held])
        for kind in kinds:
            s.prepare(kind, hidden=HIDDEN, dtype=torch.float32, max_tokens=2, backend=backend)
            x = torch.full((2, HIDDEN), part)
            residual, weight = torch.full_like(x, 5), torch.ones(HIDDEN)
            outs = [s.all_reduce_add_rms_norm(x, residual, weight, eps=1e-6, group=kind) for _ in range(CALLS)]
            found[kind] = [value for out in outs for value in out.residual.unique().tolist()]
        (marks / str(s.world_rank)).touch()
    return found


def _wait_for(marks: Path, ranks: list[int]) -> None:
    assert ranks, "every rank waits for the late one, so nothing is shown"
    ends = time.monotonic() + 15
    while not all((marks / str(r)).exists() for r in ranks):
        assert time.monotonic() < ends, f"world ranks {ranks} have not ended while this one stands still"
        time.sleep(0.005)
