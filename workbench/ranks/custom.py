"""Groups of a program that has no rules here: checked lists, taken as they are."""

from __future__ import annotations

import re
from collections.abc import Mapping

from workbench.errors import LayoutError
from workbench.ranks.grid import RankLists
from workbench.ranks.layout import Layout
from workbench.ranks.sizes import MAX_WORLD_SIZE, is_whole, show

_KIND = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


def parse_groups(groups: object, world_size: object) -> tuple[int, dict[str, RankLists]]:
    """(world size, lists by kind), both checked. Raises LayoutError; see GroupMap.custom."""
    if not isinstance(groups, Mapping) or not groups:
        raise LayoutError(f"groups are {show(groups)}; allowed: a non-empty dict, kind -> lists of world ranks")
    if world_size is not None and not (is_whole(world_size) and 1 <= world_size <= MAX_WORLD_SIZE):
        raise LayoutError(f"world_size={show(world_size)}; allowed: None or a whole number from 1 to {MAX_WORLD_SIZE}")
    limit = MAX_WORLD_SIZE if world_size is None else world_size
    lists = {_parse_kind(kind): _parse_lists(kind, given, limit) for kind, given in groups.items()}
    highest = max(max(ranks) for rows in lists.values() for ranks in rows)
    return highest + 1 if world_size is None else world_size, lists


def lay_out(lists: Mapping[str, RankLists]) -> Layout:
    layout = Layout()
    for kind, rows in lists.items():
        layout.create(kind, rows, "lists given by the program")
    return layout


def _parse_kind(kind: object) -> str:
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise LayoutError(f"kind {show(kind)} is not a plain word; allowed: letters, digits, '_', '.', '-', at most 64")
    return kind


def _parse_lists(kind: str, given: object, limit: int) -> RankLists:
    if not isinstance(given, list | tuple) or not given:
        raise LayoutError(f"groups of kind {kind!r} are {show(given)}; allowed: a non-empty list of rank lists")
    home: dict[int, int] = {}
    rows = []
    for place, ranks in enumerate(given):
        if not isinstance(ranks, list | tuple) or not ranks:
            raise LayoutError(f"group {place} of kind {kind!r} is {show(ranks)}; allowed: a non-empty list of ranks")
        for rank in ranks:
            if not is_whole(rank) or not 0 <= rank < limit:
                raise LayoutError(
                    f"group {place} of kind {kind!r} holds world rank {show(rank)}; "
                    f"allowed: whole numbers 0..{limit - 1}"
                )
            if rank in home:
                raise LayoutError(
                    f"world rank {rank} is in groups {home[rank]} and {place} of kind {kind!r}; "
                    "allowed: one group of a kind; give the second group another kind"
                )
            home[rank] = place
        rows.append(tuple(ranks))
    return tuple(rows)
