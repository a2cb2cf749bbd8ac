"""What a Cluster is asked for, checked before anything starts: how many ranks, on which device."""

from __future__ import annotations

import sys

import torch

from workbench.errors import ArgumentError, LayoutError
from workbench.ranks import GroupMap

MAX_RANKS = 64


def count_ranks(ranks: int | None, group_map: GroupMap | None) -> int:
    """`ranks`, else the world of the group map, else 4. Raises: ArgumentError; LayoutError if the two do not agree."""
    if group_map is not None and not isinstance(group_map, GroupMap):
        raise ArgumentError(f"group_map is a {type(group_map).__name__}; allowed: a GroupMap, from GroupMap.build(...)")
    world = group_map.world_size if group_map is not None else None
    wanted = ranks if ranks is not None else world or 4
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not 1 <= wanted <= MAX_RANKS:
        raise ArgumentError(f"ranks={wanted!r}; allowed: a whole number from 1 to {MAX_RANKS}")
    if world is not None and wanted != world:
        raise LayoutError(f"ranks={wanted}, but the group map is for {world} ranks; leave ranks out")
    return wanted


def place_ranks(asked: str | None, setting: str | None, ranks: int, *, share: bool = False) -> str:
    """The device of all ranks: what was asked, else the setting, else what there is.

    A setting gives way to the number of ranks: a walk through a notebook needs its ranks more than it needs GPUs.
    share: ranks may share a GPU, so any number of them has one where there is one.
    Raises: ArgumentError for another word, or for cuda with fewer GPUs than ranks.
    """
    if asked not in (None, "cpu", "cuda"):
        raise ArgumentError(f"device={asked!r}; allowed: 'cpu', 'cuda', or None for what there is")
    gpus = torch.cuda.device_count()
    if gpus and (asked or setting) == "cuda" and share:
        return "cuda"
    if asked == "cuda" and gpus < ranks:
        raise ArgumentError(
            f"{ranks} ranks on cuda need a GPU each, torch finds {gpus}; use 'cpu', fewer ranks, or "
            f"WORKBENCH_SHARE_GPUS=1 (several ranks a GPU: right results, times that mean nothing)"
        )
    if asked is None and setting == "cuda" and gpus < ranks:
        print(f"{ranks} ranks and {gpus} GPUs: CPU ranks, whatever WORKBENCH_DEVICE=cuda says", file=sys.stderr)
        return "cpu"
    return asked or setting or ("cuda" if gpus >= ranks else "cpu")
