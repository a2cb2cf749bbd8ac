"""flashinfer-ai/flashinfer#3418.

Symptom: setting up a fused workspace fails, or reads a wrong peer's handle, as soon as a group does not begin at world
rank 0. Cause: the library's broadcast passed a place in the group on as torch's `src`, which is a world rank; and group
None, which torch takes for WORLD in some calls, is an unknown group in others.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.bugs.worlds import error_name, new_groups, open_session, plain_world
from tests.forked import run_ranks
from workbench.ranks import GroupMap

BLOCKS = [[0, 1], [2, 3]]
INTERLEAVED = [[0, 2], [1, 3]]


def _broadcast_as_the_library_did(lists: list[list[int]], group_root: int, rank: int) -> tuple[object, object]:
    """A tensor and an object from the member at place `group_root`, which is handed to torch as if it were a rank."""
    place = 0 if rank in lists[0] else 1
    group = new_groups(*lists)[place]

    def tensor() -> float:
        x = torch.tensor([rank * 10.0])
        dist.broadcast(x, src=group_root, group=group)
        return x.item()

    def thing() -> str:
        box = [f"handle of {rank}"]
        dist.broadcast_object_list(box, src=group_root, group=group)
        return box[0]

    return error_name(tensor), error_name(thing)


def test_old_a_place_taken_for_a_rank_fails_in_one_group_and_gives_wrong_data_in_another() -> None:
    def body(rank: int) -> list[tuple[object, object]]:
        with plain_world():
            return [
                _broadcast_as_the_library_did(BLOCKS, 0, rank),
                _broadcast_as_the_library_did(INTERLEAVED, 1, rank),
            ]

    by_rank = run_ranks(4, body)
    refused = ("ValueError", "ValueError")
    assert [blocks for blocks, _ in by_rank] == [(0.0, "handle of 0")] * 2 + [refused] * 2
    # Meant was the second member: world rank 2 for [0,2], world rank 3 for [1,3]. No error in [1,3], and rank 1's data.
    assert [woven for _, woven in by_rank] == [refused, (10.0, "handle of 1")] * 2


def test_old_group_none_is_not_world_everywhere() -> None:
    def body(rank: int) -> object:
        with plain_world():
            return error_name(lambda: dist.get_global_rank(None, 0))

    assert run_ranks(2, body) == ["ValueError"] * 2


@pytest.mark.parametrize(
    ("lists", "group_root", "wanted"),
    [
        (BLOCKS, 0, [0, 0, 2, 2]),
        (BLOCKS, 1, [1, 1, 3, 3]),
        (INTERLEAVED, 0, [0, 1, 0, 1]),
        (INTERLEAVED, 1, [2, 3, 2, 3]),
    ],
)
def test_a_place_in_the_group_is_translated_to_its_world_rank(lists, group_root: int, wanted: list[int]) -> None:
    def body(rank: int) -> str:
        with open_session(GroupMap.custom({"tp": lists})) as s:
            return s.broadcast_object(f"handle of {rank}", group="tp", group_root=group_root)

    assert run_ranks(4, body) == [f"handle of {root}" for root in wanted]


def test_the_world_is_a_kind_with_a_name_and_no_group_is_a_default() -> None:
    def body(rank: int) -> tuple[object, str]:
        with open_session(GroupMap.custom({"everyone": [[0, 1, 2, 3]]})) as s:
            nameless = error_name(lambda: s.broadcast_object("x", group_root=0))
            return nameless, s.broadcast_object(f"handle of {rank}", group="everyone", group_root=2)

    assert run_ranks(4, body) == [("TypeError", "handle of 2")] * 4
