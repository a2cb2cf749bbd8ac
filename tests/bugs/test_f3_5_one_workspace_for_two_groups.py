"""NVIDIA/TensorRT-LLM#3988 and #10633.

Symptom: the fused all-reduce hangs now and then with TP and PP. Cause: workspaces were cached by rank and dtype, so two
pipeline stages of one process shared one; in the second report the cache was per thread, so a thread found none.
"""

from __future__ import annotations

import threading

import torch

from tests.bugs.worlds import HIDDEN, fused, only, open_session
from tests.forked import run_ranks
from workbench.plan import WorkspaceKey
from workbench.ranks import GroupMap

TWO_KINDS = GroupMap.custom({"stage0": [[0, 1], [2, 3]], "stage1": [[0, 2], [1, 3]], "again": [[0, 1], [2, 3]]})


def test_old_cached_by_rank_and_dtype_the_second_group_gets_the_firsts_memory() -> None:
    cache: dict[tuple[int, str], tuple[int, ...]] = {}

    def workspace(rank: int, dtype: str, members: tuple[int, ...]) -> tuple[int, ...]:
        return cache.setdefault((rank, dtype), members)  # a workspace, known by whom its peers are

    assert workspace(0, "bf16", (0, 1)) == (0, 1)
    assert workspace(0, "bf16", (0, 2)) == (0, 1)  # rank 0 waits for rank 1 where rank 2 is meant


def test_two_groups_of_one_process_have_a_workspace_each_and_equal_lists_share_one() -> None:
    def body(rank: int) -> tuple[int, int, int, float, float, float]:
        with open_session(TWO_KINDS, "stage0", max_tokens=2) as s:
            s.prepare("stage1", hidden=HIDDEN, dtype=torch.float32, max_tokens=64)
            capacities = [s.why(kind).capacity_tokens for kind in ("stage0", "stage1", "again")]
            sums = [only(fused(s, kind, tokens=2).residual) for kind in ("stage0", "stage1", "again")]
            return (*capacities, *sums)

    assert run_ranks(4, body) == [
        (2, 64, 2, 16.0, 106.0, 16.0),
        (2, 64, 2, 16.0, 1015.0, 16.0),
        (2, 64, 2, 1105.0, 106.0, 1105.0),
        (2, 64, 2, 1105.0, 1015.0, 1105.0),
    ]


def test_another_thread_finds_the_same_workspace() -> None:
    def body(rank: int) -> tuple[float, str]:
        with open_session(TWO_KINDS, "stage0") as s:
            found: list[tuple[float, str]] = []
            thread = threading.Thread(
                target=lambda: found.append((only(fused(s, "stage0").residual), s.why("stage0").choice))
            )
            thread.start()
            thread.join(20)
            return found[0]

    assert run_ranks(4, body) == [(16.0, "shm")] * 2 + [(1105.0, "shm")] * 2


def test_the_key_of_a_workspace_holds_its_members() -> None:
    def key(*ranks: int) -> WorkspaceKey:
        return WorkspaceKey(world_ranks=ranks, backend="shm", dtype="bfloat16", hidden=8, purpose="fused")

    assert key(0, 1) == key(0, 1)
    assert len({key(0, 1), key(0, 2), key(1, 0)}) == 3
