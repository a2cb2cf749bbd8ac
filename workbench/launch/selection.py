"""Which ranks are meant: "0,2", "1-3", "tp", "tp:0", a number, numbers, or nothing for all. Pure."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence

from workbench.errors import ArgumentError, LayoutError
from workbench.ranks import GroupMap

Ranks = str | int | Sequence[int] | None


def select_ranks(wanted: Ranks, num_ranks: int, group_map: GroupMap | None) -> tuple[int, ...]:
    """The world ranks meant, ascending.

    Raises: ArgumentError for what is not understood, or a rank that is not there; LayoutError for an unknown kind.
    """
    if wanted is None or (isinstance(wanted, str) and wanted in ("", "all")):
        return tuple(range(num_ranks))
    found: Sequence[object] = (
        _from_text(wanted, num_ranks, group_map) if isinstance(wanted, str) else _from_numbers(wanted)
    )
    outside = [r for r in found if isinstance(r, bool) or not isinstance(r, int) or not 0 <= r < num_ranks]
    if outside or not found:
        named = ", ".join(dict.fromkeys(map(repr, outside))) or "no rank"
        raise ArgumentError(f"ranks={wanted!r} names {named}; this cluster has world ranks 0..{num_ranks - 1}")
    return tuple(sorted({r for r in found if isinstance(r, int)}))


def ranks_label(world_ranks: Sequence[int]) -> str:
    """'0-3', '0,2' or '0-1,3': runs of three and more, or of two at an end, are shortened."""
    runs: list[list[int]] = []
    for r in sorted(world_ranks):
        if runs and r == runs[-1][-1] + 1:
            runs[-1].append(r)
        else:
            runs.append([r])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def ranks_words(world_ranks: Sequence[int]) -> str:
    """'world rank 2' or 'world ranks 0-3'."""
    return f"world rank{'' if len(world_ranks) == 1 else 's'} {ranks_label(world_ranks)}"


def _from_numbers(wanted: object) -> list[object]:
    """What was given, with numpy's and torch's whole numbers as Python's; whatever is no number stays as it is."""
    one = _whole(wanted)
    if isinstance(one, int) or not isinstance(wanted, Iterable):
        return [one]
    return [_whole(r) for r in wanted]


def _whole(value: object) -> object:
    try:
        return value if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]  # that is asked
    except TypeError:
        return value


def _from_text(text: str, num_ranks: int, group_map: GroupMap | None) -> list[int]:
    if re.fullmatch(r"\s*\d{1,9}(-\d{1,9})?(\s*,\s*\d{1,9}(-\d{1,9})?)*\s*", text):
        found: list[int] = []
        for part in text.split(","):
            first, _, last = part.strip().partition("-")
            ends = int(first), int(last or first)
            found += ends if max(ends) >= num_ranks else range(ends[0], ends[1] + 1)  # a wrong end is told by itself
        return found
    match = re.fullmatch(r"\s*([A-Za-z_]\w*)(?::(\d+))?\s*", text)
    if match is None:
        raise ArgumentError(
            f"ranks={text!r} is not understood; write 0,2 or 1-3, a kind such as tp, or one group: tp:0"
        )
    kind, place = match[1], match[2]
    if group_map is None:
        raise ArgumentError(
            f"ranks={text!r} names a kind of group, but this cluster has no group map; start it with "
            f"Cluster(group_map=GroupMap.build(...)), or write world ranks"
        )
    keys = group_map.keys(kind)
    if place is None:
        return [r for key in keys for r in key.world_ranks]
    if int(place) >= len(keys):
        raise LayoutError(f"ranks={text!r}: {kind} has {len(keys)} groups, numbered 0..{len(keys) - 1}")
    return list(keys[int(place)].world_ranks)
