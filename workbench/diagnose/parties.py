"""Parties: the ranks that said one thing, where all should have said the same. Who is at fault is decided by number."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.diagnose.words import ranks_words


def parties(said: Mapping[int, object]) -> list[tuple[object, tuple[int, ...]]]:
    """Who said what: the largest party first, of equal ones that with the lowest world rank."""
    found: dict[object, list[int]] = {}
    for rank in sorted(said):
        found.setdefault(said[rank], []).append(rank)
    return sorted(((what, tuple(ranks)) for what, ranks in found.items()), key=lambda p: (-len(p[1]), p[1]))


def at_fault(said: Mapping[int, object]) -> tuple[int, ...]:
    """The world ranks outside the largest party; all of them if there is no single largest."""
    found = parties(said)
    if len(found) > 1 and len(found[0][1]) == len(found[1][1]):
        return tuple(sorted(said))
    return tuple(sorted(r for _, ranks in found[1:] for r in ranks))


def parties_words(said: Mapping[int, object], notes: Mapping[int, str] | None = None) -> str:
    """'4 (train.py:7) on world rank 0, 6 on world ranks 1-3': what each rank said, and the note of a party's first."""
    told = []
    for what, ranks in parties(said):
        note = (notes or {}).get(ranks[0], "")
        told.append(f"{what} {note} on {ranks_words(ranks)}" if note else f"{what} on {ranks_words(ranks)}")
    return ", ".join(told)
