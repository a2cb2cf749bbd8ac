"""lightseekorg/tokenspeed#786.

Symptom: with DP attention, requests of every replica but the first vanish or stall. Cause: a broadcast helper got the
process's rank in its TP group together with a source given as a world rank, so the source took the receiver's branch.
"""

from __future__ import annotations

import pickle

import torch
import torch.distributed as dist

from tests.bugs.worlds import new_groups, open_session, plain_world
from tests.forked import run_ranks
from workbench.ranks import GroupMap


def _broadcast_requests(requests: list[str] | None, my_rank: int, src: int, group: dist.ProcessGroup) -> list[str]:
    """First the length, then the bytes; whoever is not the source receives. The two ranks are of two numberings."""
    if my_rank == src:
        data = torch.frombuffer(bytearray(pickle.dumps(requests)), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(data)]), src=src, group=group)
        dist.broadcast(data, src=src, group=group)
        return requests
    length = torch.tensor([0])
    dist.broadcast(length, src=src, group=group)
    if length.item() == 0:
        return []
    data = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(data, src=src, group=group)
    return pickle.loads(bytes(data.tolist()))


def test_old_the_second_replicas_requests_vanish() -> None:
    def body(rank: int) -> list[str]:
        with plain_world():
            group = new_groups([0, 1], [2, 3])[rank // 2]
            requests = [f"request for replica {rank // 2}"] if rank % 2 == 0 else None
            return _broadcast_requests(requests, dist.get_rank(group), rank // 2 * 2, group)

    assert run_ranks(4, body) == [["request for replica 0"]] * 2 + [[]] * 2


def test_every_member_of_every_replica_receives_its_requests() -> None:
    group_map = GroupMap.build("sglang", tp=4, attn_dp=2)
    assert group_map.groups["attention_tp"] == ((0, 1), (2, 3))

    def body(rank: int) -> list[str]:
        with open_session(group_map) as s:
            leads = s.group("attention_tp").group_rank(rank) == 0
            requests = [f"request for replica {rank // 2}"] if leads else None
            return s.broadcast_object(requests, group="attention_tp", group_root=0)

    assert run_ranks(4, body) == [["request for replica 0"]] * 2 + [["request for replica 1"]] * 2
