"""World ranks on named axes. Every layout rule here is: read the grid in some axis order, cut it into equal lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

RankLists = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """World ranks counted up along `axes` ((name, size), ...), slowest axis first, so the last axis has stride 1."""

    axes: tuple[tuple[str, int], ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def size(self) -> int:
        return prod(size for _, size in self.axes)

    def width(self, names: Sequence[str]) -> int:
        """How many ranks differ in nothing but `names`."""
        sizes = dict(self.axes)
        return prod(sizes[name] for name in names)

    def read(self, order: Sequence[str]) -> tuple[int, ...]:
        """All ranks, with the axes walked in `order` (slowest first), which names every axis once."""
        strides = self._strides()
        sizes = dict(self.axes)
        ranks = [0]
        for name in order:
            steps = [place * strides[name] for place in range(sizes[name])]
            ranks = [rank + step for rank in ranks for step in steps]
        return tuple(ranks)

    def lists(self, inner: Sequence[str], *, outer: Sequence[str] | None = None) -> RankLists:
        """One list for each place on the other axes; inside a list the axes `inner` move, the last of them fastest.

        `outer` is the order in which the lists follow each other, slowest axis first; the default is the grid's own.
        """
        before = [name for name in self.names if name not in inner] if outer is None else outer
        return cut(self.read((*before, *inner)), self.width(inner))

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of `rank` on every axis."""
        strides = self._strides()
        return {name: rank // strides[name] % size for name, size in self.axes}

    def _strides(self) -> dict[str, int]:
        strides: dict[str, int] = {}
        stride = 1
        for name, size in reversed(self.axes):
            strides[name] = stride
            stride *= size
        return strides


def cut(ranks: Sequence[int], length: int) -> RankLists:
    """Consecutive pieces of `length`; the last is shorter when `length` does not divide."""
    return tuple(tuple(ranks[start : start + length]) for start in range(0, len(ranks), length))


def describe_lists(grid: Grid, inner: Sequence[str], lists: RankLists) -> str:
    """One true sentence on lists made by `grid.lists(inner)`; axes of size 1 are left out."""
    moving = [name for name, size in grid.axes if name in inner and size > 1]
    fixed = [name for name, size in grid.axes if name not in inner and size > 1]
    if not moving:
        return f"each rank alone: {' * '.join(inner)} is 1 wide"
    shared = f"that share {', '.join(fixed)} and differ in" if fixed else "of the world; they differ in"
    return f"{len(lists[0])} ranks {shared} {', '.join(moving)}; {describe_steps(lists)}"


def describe_steps(lists: RankLists) -> str:
    """'stride 4' when all steps in all lists are equal, else 'uneven steps'; 'single ranks' for lists of one."""
    steps = {after - before for ranks in lists for before, after in pairwise(ranks)}
    if not steps:
        return "single ranks"
    return f"stride {steps.pop()}" if len(steps) == 1 else "uneven steps"
