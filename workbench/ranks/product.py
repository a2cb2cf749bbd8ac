"""The group over which a sum owed to several kinds at once is taken: the product of their groups."""

from __future__ import annotations

from math import prod

from workbench.errors import LayoutError
from workbench.ranks.group_map import GroupMap
from workbench.ranks.key import GroupKey


def product_group(group_map: GroupMap, kinds: tuple[str, ...], world_rank: int) -> GroupKey:
    """The one group that holds exactly the ranks reached from `world_rank` through the groups of all `kinds`.

    EP2 x MoE-TP2 within TP4 is the TP group: one reduce there equals a reduce over each in turn. Pure.
    Raises: LayoutError if the kinds overlap (a sum over both would count some ranks twice), or if no kind of the map
    has that group.
    """
    if len(kinds) == 1:
        return group_map.group_of(kinds[0], world_rank)
    reached = {world_rank}
    for kind in kinds:
        reached = {member for rank in reached for member in group_map.group_of(kind, rank).world_ranks}
    sizes = [group_map.group_of(kind, world_rank).size for kind in kinds]
    text = " x ".join(f"{group_map.group_of(kind, world_rank)}" for kind in kinds)
    if len(reached) != prod(sizes):
        raise LayoutError(
            f"{text} for world rank {world_rank} reaches {len(reached)} ranks, not {prod(sizes)}: the groups overlap, "
            f"so a sum over all of them would count some ranks twice; owe each rank's part to one kind alone"
        )
    for kind in group_map.groups:
        for key in group_map.keys(kind):
            if set(key.world_ranks) == reached:
                return key
    raise LayoutError(
        f"{text} for world rank {world_rank} is the ranks {sorted(reached)}, and no kind of this map has that group; "
        f"reduce over one kind after the other"
    )
