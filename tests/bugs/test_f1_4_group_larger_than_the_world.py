"""pytorch/pytorch#149200.

Symptom: an object broadcast in a hand-made group that joins several jobs fails, or picks a wrong source. Cause: the
place in the group was turned into a world rank and back, and the small default world has no such rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.bugs.worlds import AMPLE, error_name, open_session
from tests.forked import run_outcomes, run_ranks
from workbench.errors import LayoutError
from workbench.ranks import GroupMap


@contextmanager
def _two_jobs_of_two(rank: int) -> Iterator[dist.TCPStore]:
    """Ranks 0,1 are one job and ranks 2,3 another; each has a default world of two. Gives the store that both reach."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=10))
    job = dist.PrefixStore(f"job{rank // 2}", store)
    dist.init_process_group("gloo", store=job, rank=rank % 2, world_size=2, timeout=timedelta(seconds=10))
    yield store
    store.set(f"done/{rank}", "")
    store.wait([f"done/{r}" for r in range(4)])


def test_old_by_way_of_world_ranks_nobody_receives_and_by_places_everybody_does() -> None:
    def body(rank: int) -> tuple[object, object]:
        with _two_jobs_of_two(rank) as store:
            joined, _ = distributed_c10d._new_process_group_helper(
                4, rank, [], "gloo", dist.PrefixStore("joined", store), group_name="joined", timeout=AMPLE
            )

            def by_world_rank() -> str:
                box = [f"weights of {rank}"]
                dist.broadcast_object_list(box, src=dist.get_global_rank(joined, 3), group=joined)
                return box[0]

            def by_place() -> str:
                box = [f"weights of {rank}"]
                dist.broadcast_object_list(box, group_src=3, group=joined)
                return box[0]

            return error_name(by_world_rank), error_name(by_place)

    assert run_ranks(4, body) == [("ValueError", "weights of 3")] * 4


def test_a_map_larger_than_the_default_world_is_refused_alike_with_the_reason() -> None:
    four = GroupMap.custom({"joined": [[0, 1, 2, 3]]})

    def body(rank: int) -> None:
        with _two_jobs_of_two(rank), open_session(four):
            pass

    outcomes = run_outcomes(4, body)
    assert {type(o.error) for o in outcomes} == {LayoutError}
    assert {str(o.error) for o in outcomes} == {
        "the group map is for 4 ranks, but the job has 2; start 4 ranks or build a map for 2"
    }


def test_in_a_world_of_four_the_last_member_is_heard_by_all() -> None:
    four = GroupMap.custom({"joined": [[0, 1, 2, 3]]})

    def body(rank: int) -> str:
        with open_session(four) as s:
            return s.broadcast_object(f"weights of {rank}", group="joined", group_root=3)

    assert run_ranks(4, body) == ["weights of 3"] * 4
