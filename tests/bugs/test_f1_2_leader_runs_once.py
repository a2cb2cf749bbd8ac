"""meta-pytorch/torchrec#4601.

Symptom: a helper that runs a callback on one rank of a group and shares its result raises ValueError on every host but
the first, after the callback has run. Cause: the leader was chosen by its place in the group, and the result broadcast
from the world rank of the same number.
"""

from __future__ import annotations

import torch.distributed as dist

from tests.bugs.worlds import new_groups, open_session, plain_world
from tests.forked import run_ranks
from workbench.ranks import GroupMap

HOSTS = [[0, 1], [2, 3]]


def test_old_the_callback_runs_and_its_result_is_lost_in_the_second_group() -> None:
    def body(rank: int) -> tuple[int, object]:
        with plain_world():
            group = new_groups(*HOSTS)[rank // 2]
            box, ran = [None], 0
            if dist.get_rank(group) == 0:
                box, ran = [f"table of {rank}"], 1
            try:
                dist.broadcast_object_list(box, src=0, group=group)
            except ValueError:
                return ran, "ValueError"
            return ran, box[0]

    assert run_ranks(4, body) == [(1, "table of 0"), (0, "table of 0"), (1, "ValueError"), (0, "ValueError")]


def test_every_member_gets_its_leaders_value_and_the_callback_runs_once_a_group() -> None:
    def body(rank: int) -> tuple[str, list[int]]:
        with open_session(GroupMap.custom({"host": HOSTS})) as s:
            leads = s.group("host").group_rank(rank) == 0
            value = s.broadcast_object(f"table of {rank}" if leads else None, group="host", group_root=0)
            return value, s.gather_object(int(leads), group="host")

    assert run_ranks(4, body) == [("table of 0", [1, 0])] * 2 + [("table of 2", [1, 0])] * 2
