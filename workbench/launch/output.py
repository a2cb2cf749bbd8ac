"""What ranks print, as one text: each line labelled with its ranks, and lines in common shown once. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.launch.selection import ranks_label

Rich = tuple[Mapping[str, Any], Mapping[str, Any]]  # data by MIME type, and its metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutput:
    """What one rank has shown so far in one cell. `rich` are figures and the like, in the order they came."""

    stdout: str = ""
    stderr: str = ""
    rich: tuple[Rich, ...] = field(default=())


def merge_lines(texts: Mapping[int, str], *, note: str = "") -> str:
    """The texts of ranks as one: "[0-3] line". Deterministic: by line number, then by rank.

    The n-th lines of all ranks are compared. Where the same ranks agree over several lines, these stay together, so
    that a table printed by each rank is not torn apart. `note` follows the ranks in each label.
    """
    lines = {r: _lines(text) for r, text in texts.items()}
    blocks: list[tuple[tuple[tuple[int, ...], ...], list[dict[int, str]]]] = []
    for n in range(max((len(found) for found in lines.values()), default=0)):
        row = {r: found[n] for r, found in sorted(lines.items()) if n < len(found)}
        parties = _parties(row)
        if blocks and blocks[-1][0] == parties:
            blocks[-1][1].append(row)
        else:
            blocks.append((parties, [row]))
    told = []
    for parties, rows in blocks:
        for ranks in parties:
            label = f"[{ranks_label(ranks)}{note}]"
            told += [f"{label} {row[ranks[0]]}".rstrip() + "\n" for row in rows]
    return "".join(told)


def _parties(row: Mapping[int, str]) -> tuple[tuple[int, ...], ...]:
    """Ranks with equal lines, by their lowest rank."""
    by_line: dict[str, list[int]] = {}
    for r, line in row.items():
        by_line.setdefault(line, []).append(r)
    return tuple(tuple(ranks) for ranks in by_line.values())


def _lines(text: str) -> list[str]:
    """Lines as a terminal would leave them: what a carriage return overwrote is gone."""
    return [line.rstrip("\r").rpartition("\r")[2] for line in text.removesuffix("\n").split("\n")] if text else []
