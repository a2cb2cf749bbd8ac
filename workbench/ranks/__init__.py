"""Who is in which group: sizes of a parallel layout to lists of world ranks. Pure Python, no torch."""

from workbench.ranks.group_map import SYSTEMS, GroupMap
from workbench.ranks.key import GroupKey
from workbench.ranks.product import product_group
from workbench.ranks.sizes import MAX_WORLD_SIZE

__all__ = ["MAX_WORLD_SIZE", "SYSTEMS", "GroupKey", "GroupMap", "product_group"]
