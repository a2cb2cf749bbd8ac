"""The words of findings: names of ranks, calls and call sites."""

from __future__ import annotations

import re
from collections.abc import Iterable

from workbench.trace import Event, GroupInfo, RankCall

_MOST_ERROR = 400  # characters
_CPP_STACK = re.compile(r"\s*(Exception raised from .* \(most recent call first\)|C\+\+ CapturedTraceback)")
_ADDRESS = re.compile(r"\[?[0-9a-fA-F:.]+\]?:\d+|\b0x[0-9a-fA-F]+")


def ranks_words(world_ranks: Iterable[int]) -> str:
    """'world rank 2', 'world ranks 0,2' or 'world ranks 0-3,5'; 'nobody' for none."""
    ordered = sorted(set(world_ranks))
    if not ordered:
        return "nobody"
    runs: list[list[int]] = []
    for r in ordered:
        if runs and r == runs[-1][-1] + 1:
            runs[-1].append(r)
        else:
            runs.append([r])
    text = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)
    return f"world rank{'s' if len(ordered) > 1 else ''} {text}"


def call_words(event: Event) -> str:
    """The call as the program wrote it, and where: 'all_reduce in step (train.py:12)'."""
    return event.op if event.site is None else f"{event.op} in {event.site}"


def group_words(group: GroupInfo | None) -> str:
    """'tp[0,1]', and the generation if groups were rebuilt."""
    if group is None:
        return "no group"
    return str(group.key) if group.generation == 0 else f"{group.key} generation {group.generation}"


def evidence_of(calls: Iterable[RankCall], most: int = 8) -> tuple[str, ...]:
    """One line a call: its begin, and how it ended."""
    lines: list[str] = []
    told: set[str] = set()
    for call in calls:
        ended = "never ended" if call.end is None else "returned"
        if call.end is not None and call.end.error:
            same = without_address(call.end.error)
            ended = "raised the same" if same in told else f"raised {error_words(call.end.error)}"
            told.add(same)
        lines.append(f"{call.event}: {ended}")
    return (*lines[:most], f"and {len(lines) - most} more") if len(lines) > most else tuple(lines)


def raised(calls: Iterable[RankCall]) -> str:
    """' World ranks 0,2 raised ....', with each text once; '' if nothing was raised."""
    texts: dict[str, str] = {}
    ranks: dict[str, list[int]] = {}
    for call in calls:
        if call.end is not None and call.end.error:
            same = without_address(call.end.error)
            texts.setdefault(same, error_words(call.end.error))
            ranks.setdefault(same, []).append(call.event.world_rank)
    told = "; ".join(f"{ranks_words(ranks[same])} raised {text}" for same, text in texts.items())
    return f" {told[0].upper()}{told[1:]}{'' if told.endswith(('.', '!', '?')) else '.'}" if told else ""


def error_words(text: str) -> str:
    """An exception's text on one line, without the stack of C++ that torch adds to it."""
    line = " ".join(_CPP_STACK.split(text, maxsplit=1)[0].split()).removesuffix(":")  # one that says nothing
    return line if len(line) <= _MOST_ERROR else f"{line[: _MOST_ERROR - 3]}..."


def without_address(text: str) -> str:
    """What an exception says alike on ranks that name an address and a port each, or an object of their own memory."""
    return _ADDRESS.sub("", error_words(text))
