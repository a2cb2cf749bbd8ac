"""Pins the root translation: an in-group root is a place in the group's list, never a world rank.

The old behaviour, still what plain torch does with `src=`: ValueError in [0,2], silently the wrong data in [1,3].
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.forked import run_ranks
from workbench.errors import LayoutError
from workbench.ranks import GroupMap
from workbench.runtime import Session

INTERLEAVED = GroupMap.custom({"tp": [[0, 2], [1, 3]]})
BLOCKS = GroupMap.custom({"tp": [[0, 1], [2, 3]]})


@pytest.mark.parametrize(
    ("group_map", "root", "wanted"),
    [
        (INTERLEAVED, 0, [0, 1, 0, 1]),
        (INTERLEAVED, 1, [20, 30, 20, 30]),
        (BLOCKS, 0, [0, 0, 20, 20]),
        (BLOCKS, 1, [10, 10, 30, 30]),
    ],
    ids=["interleaved-0", "interleaved-1", "blocks-0", "blocks-1"],
)
def test_subgroup_root_is_translated_to_world_rank(group_map: GroupMap, root: int, wanted: list[int]) -> None:
    def body(rank: int) -> int:
        value = {0: 0, 1: 1 if group_map is INTERLEAVED and root == 0 else 10}.get(rank, rank * 10)
        with Session(group_map, device="cpu", timeout_s=20) as s:
            return s.broadcast_object({"value": value}, group="tp", group_root=root)["value"]

    assert run_ranks(4, body) == wanted


def test_plain_torch_with_a_group_root_as_src_gives_the_wrong_data_in_one_group_and_an_error_in_the_other() -> None:
    def body(rank: int) -> str | float:
        with Session(INTERLEAVED, device="cpu", timeout_s=20) as s:
            x = torch.tensor([rank * 10.0])
            try:
                dist.broadcast(x, src=1, group=s.torch_group("tp"))
            except ValueError:
                return "ValueError"
            return x.item()

    assert run_ranks(4, body) == ["ValueError", 10.0, "ValueError", 10.0]  # right: 20, 30, 20, 30


def test_a_list_that_is_not_ascending_keeps_its_own_numbering() -> None:
    """torch sorts [3, 0, 2]; place 0 of the list is still world rank 3."""
    group_map = GroupMap.custom({"ring": [[3, 0, 2]], "rest": [[1]]})

    def body(rank: int) -> tuple[list[int], str] | None:
        with Session(group_map, device="cpu", timeout_s=20) as s:
            if rank == 1:
                return None
            return s.gather_object(rank, group="ring"), s.broadcast_object(f"from {rank}", group="ring", group_root=0)

    assert run_ranks(4, body) == [([3, 0, 2], "from 3"), None, ([3, 0, 2], "from 3"), ([3, 0, 2], "from 3")]


def test_a_root_outside_the_group_is_refused_before_any_wait() -> None:
    def body(rank: int) -> None:
        with Session(INTERLEAVED, device="cpu", timeout_s=20) as s:
            with pytest.raises(LayoutError, match="no group rank 2"):
                s.broadcast_object(1, group="tp", group_root=2)
            assert s.broadcast_object(rank, group="tp", group_root=0) == rank % 2

    run_ranks(4, body)


def test_a_rank_outside_the_kind_is_refused() -> None:
    group_map = GroupMap.custom({"pair": [[0, 1]], "world": [[0, 1, 2]]})

    def body(rank: int) -> list[int] | str:
        with Session(group_map, device="cpu", timeout_s=20) as s:
            try:
                return s.gather_object(rank, group="pair")
            except LayoutError as e:
                return str(e)

    first, second, third = run_ranks(3, body)
    assert (first, second) == ([0, 1], [0, 1])
    assert "world rank 2" in third


@pytest.mark.parametrize("size", [0, 1, 100, 5000, 3_000_000])
def test_objects_and_values_of_any_length_arrive_whole(size: int) -> None:
    def body(rank: int) -> bool:
        with Session(BLOCKS, device="cpu", timeout_s=20) as s:
            text = str(rank) * size
            gathered = s.gather_object(text, group="tp")
            sent = s.broadcast_object(text, group="tp", group_root=1)
            members = s.group("tp").world_ranks
            return gathered == [str(r) * size for r in members] and sent == str(members[1]) * size

    assert run_ranks(4, body) == [True] * 4
