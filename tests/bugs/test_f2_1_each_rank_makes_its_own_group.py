"""pytorch/pytorch#25390.

Symptom: an error, a hang, or sums over the wrong ranks when every rank creates only the group it belongs to, or all
groups in an order of its own. Cause: torch names a group by how many the process has made, so different groups get one
name and meet under the same keys of the store. Which ranks meet depends on who comes first; here two come early.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.bugs.worlds import AMPLE, open_session, part, plain_world
from tests.forked import run_outcomes, run_ranks
from workbench.errors import PlanMismatchError
from workbench.ranks import GroupMap

HALVES = [[0, 1], [2, 3]]


def test_old_the_first_of_one_group_and_the_last_of_another_sum_with_each_other() -> None:
    def body(rank: int) -> tuple[str, float] | None:
        with plain_world():
            if rank in (1, 2):
                return None  # they come later
            group = dist.new_group(HALVES[rank // 2], timeout=AMPLE)
            x = torch.tensor([float(rank)])
            dist.all_reduce(x, group=group)
            return group.group_name, x.item()

    first, _, _, last = run_ranks(4, body)
    assert first == last  # one name for two groups
    assert first[1] == 3.0  # 0 + 3; right: 1.0 in [0,1] and 5.0 in [2,3]


def test_every_rank_sums_its_own_half_only() -> None:
    def body(rank: int) -> float:
        with open_session(GroupMap.custom({"half": HALVES}), "half") as s:
            return s.all_reduce(part(rank), group="half").unique().item()

    assert run_ranks(4, body) == [11.0, 11.0, 1100.0, 1100.0]


@pytest.mark.parametrize("how", ["own-only", "own-first"])
def test_ranks_that_come_with_different_lists_or_orders_are_refused_before_any_group_is_made(how: str) -> None:
    def body(rank: int) -> None:
        mine, other = HALVES if rank < 2 else reversed(HALVES)
        group_map = GroupMap.custom({"half": [mine] if how == "own-only" else [mine, other]}, world_size=4)
        with open_session(group_map):
            pass

    outcomes = run_outcomes(4, body)
    assert {type(o.error) for o in outcomes} == {PlanMismatchError}
    assert len({str(o.error) for o in outcomes}) == 1
    assert "world ranks 0, 1 came with" in str(outcomes[0].error)
