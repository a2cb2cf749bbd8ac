"""GroupKey: a process group's identity, which is its ordered list of world ranks and never its size."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.errors import LayoutError


@dataclass(frozen=True, slots=True)
class GroupKey:
    """One group of one kind. `world_ranks` keeps the order in which the group was asked for.

    torch sorts the ranks of a new group, so a list such as (0, 2, 1, 3) has two numberings. `group_rank` here is the
    place in the list as given; `torch_rank` is the number torch gives the same member.
    """

    kind: str
    world_ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.world_ranks)

    def world_rank(self, group_rank: int) -> int:
        """The world rank of the member at place `group_rank`. Raises LayoutError outside 0..size-1."""
        if not 0 <= group_rank < self.size:
            raise LayoutError(f"{self} has no group rank {group_rank}; allowed: 0..{self.size - 1}")
        return self.world_ranks[group_rank]

    def group_rank(self, world_rank: int) -> int:
        """The place of `world_rank` in the list. Raises LayoutError for a rank that is not a member."""
        try:
            return self.world_ranks.index(world_rank)
        except ValueError:
            raise LayoutError(f"world rank {world_rank} is not a member of {self}") from None

    def torch_rank(self, world_rank: int) -> int:
        """The rank torch.distributed gives to `world_rank` in the same group (members sorted)."""
        self.group_rank(world_rank)
        return sorted(self.world_ranks).index(world_rank)

    @property
    def numbering_differs(self) -> bool:
        """True when the list is not ascending, so that group_rank and torch_rank disagree for some member."""
        return list(self.world_ranks) != sorted(self.world_ranks)

    def __contains__(self, world_rank: object) -> bool:
        return world_rank in self.world_ranks

    def __str__(self) -> str:
        return f"{self.kind}[{','.join(map(str, self.world_ranks))}]"
