"""Layout: everything a system's rules say about one configuration, before it becomes a GroupMap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from workbench.ranks.grid import Grid, RankLists
from workbench.ranks.sizes import Problem, Sizes, SizeSpec

Channel = Literal["device", "cpu"]
DEVICE_ONLY: tuple[Channel, ...] = ("device",)
DEVICE_AND_CPU: tuple[Channel, ...] = ("device", "cpu")


@dataclass(frozen=True, slots=True)
class Part:
    """In each round of its loop, create the next `per_round` lists of `kind`, each once on every channel."""

    kind: str
    channels: tuple[Channel, ...] = DEVICE_AND_CPU
    per_round: int = 1


@dataclass(slots=True)
class Layout:
    """What the rules of one system make of one configuration. Filled by the system's file, read by GroupMap.

    `groups` holds owning kinds only; `loops` is the order of creation, one tuple of parts for each loop of the
    engine's start-up; `grids` explain where a world rank sits.
    """

    grids: tuple[Grid, ...] = ()
    groups: dict[str, RankLists] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)
    loops: list[tuple[Part, ...]] = field(default_factory=list)
    local_numbering: tuple[str, ...] = ()

    def own(self, kind: str, lists: RankLists, origin: str) -> None:
        """`kind` has groups of its own. The caller also adds the loop that creates them."""
        self.groups[kind] = lists
        self.origins[kind] = origin

    def create(self, kind: str, lists: RankLists, origin: str, channels: tuple[Channel, ...] = DEVICE_AND_CPU) -> None:
        """`kind` has groups of its own, created in a loop of its own."""
        self.own(kind, lists, origin)
        self.loops.append((Part(kind, channels),))

    def alias(self, kind: str, owner: str) -> None:
        """`kind` is the very same group object as `owner`, an alias itself or not; chains end at the real owner."""
        self.aliases[kind] = self.aliases.get(owner, owner)

    def creation_order(self) -> Iterator[tuple[str, Channel, tuple[int, ...]]]:
        """Each group creation as (kind, channel, ranks), in the order every rank makes them."""
        return walk_loops(self.loops, self.groups)


def walk_loops(
    loops: Sequence[tuple[Part, ...]], groups: Mapping[str, RankLists]
) -> Iterator[tuple[str, Channel, tuple[int, ...]]]:
    for parts in loops:
        rounds = len(groups[parts[0].kind]) // parts[0].per_round
        for turn in range(rounds):
            for part in parts:
                start = turn * part.per_round
                for ranks in groups[part.kind][start : start + part.per_round]:
                    for channel in part.channels:
                        yield part.kind, channel, ranks


@dataclass(frozen=True, slots=True)
class Rules:
    """One system: its size names and four pure functions over parsed sizes (`world` is None where left out).

    `fill_in` gives the sizes that follow from the others, `world` always among them; `find_problem` says what the
    engine refuses in any case; `find_launch_problem` what its launch checks refuse on top; `lay_out` builds what
    `find_problem` let pass, from sizes that are filled in.
    """

    system: str
    version: str
    specs: Mapping[str, SizeSpec]
    fill_in: Callable[[Sizes], Sizes]
    find_problem: Problem
    find_launch_problem: Problem
    lay_out: Callable[[Sizes], Layout]
