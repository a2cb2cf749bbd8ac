"""A GroupMap as ASCII: small worlds as a table of kinds by ranks, wide worlds as abbreviated lists."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from workbench.ranks.grid import RankLists

if TYPE_CHECKING:
    from workbench.ranks.group_map import GroupMap

MAX_COLUMNS = 32
"""The widest world drawn with one column a rank; beyond, each kind shows its first lists and its last."""

_LISTS_SHOWN = 3
_RANKS_SHOWN = 8


def draw_map(group_map: GroupMap) -> str:
    """The same text on each run: a title, a line for each owning kind, the aliases, and notes where they apply."""
    width = max(len(kind) for kind in group_map.kinds)
    lines = [group_map.title()]
    if group_map.world_size <= MAX_COLUMNS:
        digits = len(str(group_map.world_size - 1)) + 1
        ranks = range(group_map.world_size)
        lines.append(_row("kind", width, "lists", "size", "".join(f"{rank:>{digits}}" for rank in ranks)))
    else:
        digits = 0
        lines.append(_row("kind", width, "lists", "size", " world ranks"))
    for kind, lists in group_map.groups.items():
        body = _draw_places(lists, group_map.world_size, digits) if digits else f" {_draw_lists(lists)}"
        name = f"{kind}*" if kind in group_map.numbering_differs else kind
        lines.append(_row(name, width, str(len(lists)), _draw_size(lists), body))
    lines += [f"{kind} is {owner}" for kind, owner in group_map.aliases.items()]
    if digits:
        lines.append("A number is the place of the rank's list in creation order; '.': in no list.")
    if group_map.numbering_differs:
        lines.append("* has lists that are not ascending: torch numbers their members otherwise.")
    if group_map.local_numbering:
        lines.append(f"Ranks counted inside one engine: {', '.join(group_map.local_numbering)}.")
    return "\n".join(lines)


def _row(kind: str, width: int, lists: str, size: str, body: str) -> str:
    return f"{kind:<{width + 1}} {lists:>6} {size:>6} {body}".rstrip()


def _draw_places(lists: RankLists, world_size: int, digits: int) -> str:
    cells = ["."] * world_size
    for place, ranks in enumerate(lists):
        for rank in ranks:
            cells[rank] = str(place)
    return "".join(f"{cell:>{digits}}" for cell in cells)


def _draw_size(lists: RankLists) -> str:
    sizes = sorted({len(ranks) for ranks in lists})
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]}-{sizes[-1]}"


def _draw_lists(lists: RankLists) -> str:
    if len(lists) <= _LISTS_SHOWN + 1:
        return " | ".join(map(_draw_ranks, lists))
    return " | ".join([*map(_draw_ranks, lists[:_LISTS_SHOWN]), "...", _draw_ranks(lists[-1])])


def _draw_ranks(ranks: tuple[int, ...]) -> str:
    """'0..7' for neighbours, '0..56 step 8' for equal steps, else the first ranks and the last."""
    steps = {after - before for before, after in pairwise(ranks)}
    if len(ranks) > 2 and len(steps) == 1:
        step = steps.pop()
        return f"{ranks[0]}..{ranks[-1]}" + ("" if step == 1 else f" step {step}")
    if len(ranks) <= _RANKS_SHOWN:
        return ",".join(map(str, ranks))
    return ",".join([*map(str, ranks[: _RANKS_SHOWN - 2]), "...", str(ranks[-1])])
