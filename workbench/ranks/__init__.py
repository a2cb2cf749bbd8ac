"""Who is in which group: sizes of a parallel layout to lists of world ranks. Pure Python, no torch."""

from workbench.ranks.key import GroupKey

__all__ = ["GroupKey"]
