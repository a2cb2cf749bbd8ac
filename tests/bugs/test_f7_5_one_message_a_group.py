"""vllm-project/vllm#14447 (in its thread).

Symptom: TP 16 prints the same warning once a worker. Cause: sixteen ranks are not in the table, and every worker says
so for itself.
"""

from __future__ import annotations

import logging

from tests.bugs.worlds import fused, only, open_session
from tests.forked import run_ranks
from workbench.fabric import Fabric, simulated
from workbench.plan import Ask, decide_path
from workbench.ranks import GroupKey, GroupMap

SIXTEEN = tuple(range(16))


def test_old_sixteen_workers_say_the_same_sixteen_times() -> None:
    def start_worker(world_size: int) -> list[str]:
        return [] if world_size in (2, 4, 6, 8) else [f"custom all-reduce does not serve world size {world_size}"]

    lines = [line for _ in SIXTEEN for line in start_worker(16)]
    assert (len(lines), len(set(lines))) == (16, 1)


def test_sixteen_are_in_the_table_that_was_tuned_for_them_and_the_other_table_says_why_not() -> None:
    def plan(machine: str) -> tuple[str, str]:
        place = simulated(machine)
        fabric = Fabric(GroupKey("tp", SIXTEEN), tuple(place.facts_of(r) for r in SIXTEEN))
        found = decide_path(fabric, Ask(hidden=7168, tokens=8))
        return found.choice, dict(found.rejected).get("custom.fused", "")

    assert plan("gb200-4x4") == ("custom.fused.two_shot_push", "")
    choice, reason = plan("ib-2x8")
    assert choice == "nccl"
    assert reason == (
        "table sm90 has no width 16 (sixteen ranks were never tuned on Hopper, whose hosts join eight GPUs by NVLink); "
        "it has 2, 3, 4, 5, 6, 7, 8; on 2 hosts (world ranks 0..7: node0; world ranks 8..15: node1) and world ranks "
        "0..15 in no NVLink clique (state not supported, cluster none, clique 0)"
    )


def test_a_fallback_on_sixteen_real_ranks_is_told_in_one_line_for_the_group() -> None:
    def body(rank: int) -> tuple[float, list[str]]:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("workbench").addHandler(handler)
        with open_session(GroupMap.custom({"tp": [list(range(8)), list(range(8, 16))]}), "tp") as s:
            s.freeze()
            x = fused(s, "tp", tokens=5).residual
            return only(x), lines

    by_rank = run_ranks(16, body)
    told = {rank: lines for rank, (_, lines) in enumerate(by_rank) if lines}
    assert sorted(told) == [0, 8]
    assert [len(lines) for lines in told.values()] == [1, 1]
    assert told[8][0].startswith("tp[8,9,10,11,12,13,14,15]: 5 tokens exceed the 4 of the frozen shm workspace")
    assert {value for value, _ in by_rank[:8]} == {11111116.0}
