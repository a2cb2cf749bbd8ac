"""GroupMap: who is in which group, for one system and one choice of sizes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from workbench.errors import LayoutError
from workbench.ranks import custom, megatron, sglang, vllm
from workbench.ranks.draw import draw_map
from workbench.ranks.grid import Grid, RankLists
from workbench.ranks.key import GroupKey
from workbench.ranks.layout import Channel, Layout, Part, Rules, walk_loops
from workbench.ranks.sizes import (
    MAX_WORLD_SIZE,
    Sizes,
    find_nearest,
    is_whole,
    known_names,
    parse_sizes,
    show,
    show_nearest,
)

JSON_SCHEMA = 1

SYSTEMS: Mapping[str, Rules] = MappingProxyType(
    {rules.system: rules for rules in (sglang.RULES, vllm.RULES, megatron.RULES)}
)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GroupMap:
    """The process groups of one program: kinds, and for each kind its lists of world ranks in creation order.

    Made by `build` (the rules of a known system), `custom` (any lists) or `from_json`. Two maps are equal when their
    `digest` is equal, so ranks can compare digests before they trust each other. Pure: no process group is touched.

    system: "sglang", "vllm", "megatron" or "custom".
    sizes: every size of the system, defaults and `world` filled in. Same sizes, same map.
    groups: owning kinds only, in the order in which their first group is created.
    aliases: kind -> the owning kind whose very groups it uses.
    absent: kinds the system knows and this configuration does not have.
    local_numbering: kinds whose lists count ranks inside one engine (vLLM's elastic_ep), not in the world.
    launch_problem: what the engine's launch checks would say against these sizes, or None.
    """

    system: str
    sizes: Mapping[str, Any]
    world_size: int
    groups: Mapping[str, RankLists]
    aliases: Mapping[str, str]
    absent: tuple[str, ...]
    local_numbering: tuple[str, ...]
    launch_problem: str | None
    digest: str
    _origins: Mapping[str, str]
    _grids: tuple[Grid, ...]
    _loops: tuple[tuple[Part, ...], ...]
    _places: dict[str, dict[int, int]] = field(default_factory=dict)

    @classmethod
    def build(cls, system: str, *, launch_checks: bool = True, **sizes: Any) -> GroupMap:
        """The groups `system` makes of `sizes` (names as in the system's file; left out means 1, None or False).

        With `launch_checks` the sizes must also pass the checks the engine makes on its launch arguments; without, this
        builds whatever the engine's group builder builds, sometimes into groups that make no sense.

        Raises: LayoutError for an unknown system or size name, a value of wrong type or range, a world above
        MAX_WORLD_SIZE, and sizes that do not fit together; the text names what is allowed and the nearest legal choice.
        """
        rules = _find_rules(system)
        if not isinstance(launch_checks, bool):
            raise LayoutError(f"launch_checks={show(launch_checks)} is not legal; allowed: True or False")
        parsed = parse_sizes(system, rules.specs, sizes)

        def find_always(candidate: Sizes) -> str | None:
            return _find_width_problem(rules, candidate) or rules.find_problem(candidate)

        def find_any(candidate: Sizes) -> str | None:
            return find_always(candidate) or rules.find_launch_problem(candidate)

        check = find_any if launch_checks else find_always
        problem = check(parsed)
        if problem is not None:
            by_launch = " by the launch checks" if find_always(parsed) is None else ""
            nearest = find_nearest(rules.specs, parsed, check)
            text = f"{system} refuses{by_launch}: {problem}; {show_nearest(nearest, parsed)}"
            raise LayoutError(text, nearest=nearest)
        full = {**parsed, **rules.fill_in(parsed)}
        return _freeze(system, full, full["world"], rules.lay_out(full), rules.find_launch_problem(parsed))

    @classmethod
    def custom(cls, groups: Mapping[str, Any], *, world_size: int | None = None) -> GroupMap:
        """A map of any other program: kind -> lists of world ranks, in creation order.

        `world_size` defaults to the highest rank + 1. Ranks need not be ascending, and a kind need not cover the world.
        Raises: LayoutError for a kind name that is not a plain word, an empty kind or list, a rank that is not a whole
        number in the world, or a rank twice in one kind.
        """
        world, lists = custom.parse_groups(groups, world_size)
        return _freeze("custom", {"world": world}, world, custom.lay_out(lists), None)

    @property
    def kinds(self) -> tuple[str, ...]:
        """All kinds that can be asked for: owning kinds in creation order, then aliases."""
        return (*self.groups, *self.aliases)

    def owner(self, kind: str) -> str:
        """The kind that owns the groups of `kind`: itself unless it is an alias. Raises LayoutError if unknown."""
        if isinstance(kind, str):
            if kind in self.groups:
                return kind
            if kind in self.aliases:
                return self.aliases[kind]
            if kind in self.absent:
                raise LayoutError(
                    f"{self.system} has no {kind!r} groups with these sizes; "
                    f"{known_names(kind, self.kinds, 'kinds', self.system)}"
                )
        raise LayoutError(
            f"{show(kind)} is not a kind of this map; {known_names(kind, self.kinds, 'kinds', self.system)}"
        )

    def keys(self, kind: str) -> tuple[GroupKey, ...]:
        """All groups of a kind in creation order. The keys carry the owning kind, so an alias gives equal keys."""
        owner = self.owner(kind)
        return tuple(GroupKey(owner, ranks) for ranks in self.groups[owner])

    def group_of(self, kind: str, world_rank: int) -> GroupKey:
        """The group of `kind` that holds `world_rank`; the key carries the owning kind, as `keys` does.

        For a kind of `local_numbering` the rank is the one inside the engine, as in its lists.
        Raises: LayoutError for an unknown kind and for a rank outside the kind.
        """
        owner = self.owner(kind)
        return GroupKey(owner, self.groups[owner][self._place(owner, world_rank)])

    def coordinates(self, world_rank: int) -> dict[str, int]:
        """Where a world rank sits on each axis of the layout (`attn_cp`, `moe_ep` ...). Empty for a custom map."""
        self._require_rank(world_rank)
        return {name: place for grid in self._grids for name, place in grid.coordinates(world_rank).items()}

    @property
    def widths(self) -> dict[str, int]:
        """The size of each axis that `coordinates` names, derived ones such as `attn_tp` included."""
        return {name: size for grid in self._grids for name, size in grid.axes}

    def origin(self, kind: str) -> str:
        """One sentence on how the lists of a kind came about, e.g.
        '2 ranks that share attn_dp, attn_tp and differ in attn_cp; stride 2'."""
        owner = self.owner(kind)
        sentence = self._origins[owner]
        return sentence if owner == kind else f"the very groups of {owner}: {sentence}"

    def creation_order(self) -> Iterator[tuple[str, Channel, tuple[int, ...]]]:
        """Each `new_group` call every rank makes at start-up, as (kind, "device" or "cpu", ranks), in order."""
        return walk_loops(self._loops, self.groups)

    @property
    def new_group_calls(self) -> int:
        """How many groups every rank creates at start-up, device and cpu groups counted apart."""
        return sum(len(self.groups[part.kind]) * len(part.channels) for parts in self._loops for part in parts)

    @property
    def cpu_group_kinds(self) -> tuple[str, ...]:
        """Owning kinds that also get a gloo group for each list."""
        with_cpu = {part.kind for parts in self._loops for part in parts if "cpu" in part.channels}
        return tuple(kind for kind in self.groups if kind in with_cpu)

    @property
    def numbering_differs(self) -> tuple[str, ...]:
        """Owning kinds with a list that is not ascending: torch numbers such members differently (see GroupKey)."""
        return tuple(kind for kind, lists in self.groups.items() if any(list(row) != sorted(row) for row in lists))

    def to_json(self) -> dict[str, Any]:
        """A dict for `json.dumps`; `from_json` gives an equal map back."""
        return {
            "schema": JSON_SCHEMA,
            "system": self.system,
            "sizes": _plain_sizes(self.sizes),
            "world_size": self.world_size,
            "groups": {kind: [list(ranks) for ranks in lists] for kind, lists in self.groups.items()},
            "aliases": dict(self.aliases),
            "local_numbering": list(self.local_numbering),
            "digest": self.digest,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> GroupMap:
        """The map `to_json` wrote: built anew from sizes (a custom map: from lists) and compared, never trusted.

        Raises: LayoutError for a document of another shape or schema, or one whose groups are not those of its sizes.
        """
        if not isinstance(document, Mapping):
            raise LayoutError(f"a group map is read from a dict, got {show(document)}; parse the text with json.loads")
        if document.get("schema") != JSON_SCHEMA:
            raise LayoutError(f"group map of schema {show(document.get('schema'))}; allowed: {JSON_SCHEMA}")
        system, sizes = document.get("system"), document.get("sizes")
        if not isinstance(sizes, Mapping) or not all(isinstance(name, str) for name in sizes):
            raise LayoutError(f"sizes of a group map are {show(sizes)}; allowed: a dict with size names")
        if system == "custom":
            rebuilt = cls.custom(document.get("groups"), world_size=document.get("world_size"))  # type: ignore[arg-type]  # checked there
        else:
            _find_rules(system)
            rebuilt = cls.build(system, launch_checks=False, **_without_reserved(sizes))  # type: ignore[arg-type]  # a known system's name
        expected = rebuilt.to_json()
        for name, value in expected.items():
            if document.get(name) != value:
                raise LayoutError(
                    f"group map says {name}={show(document.get(name))}, but its sizes give {show(value)}; "
                    "it was changed, or written for another version of the system"
                )
        return rebuilt

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, GroupMap) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[Any, ...]:
        return GroupMap.from_json, (self.to_json(),)

    def __str__(self) -> str:
        return draw_map(self)

    def __repr__(self) -> str:
        return f"GroupMap({self.title()})"

    def title(self) -> str:
        """One line: system, the sizes that differ from their defaults, world size, first digits of the digest."""
        specs = SYSTEMS[self.system].specs if self.system in SYSTEMS else {}
        told = [f"{name}={value}" for name, value in _plain_sizes(self.sizes).items() if _is_told(name, value, specs)]
        return " ".join([self.system, *told, f"world={self.world_size}", f"digest={self.digest[:12]}"])

    def _place(self, owner: str, world_rank: int) -> int:
        places = self._places.get(owner)
        if places is None:
            places = {rank: place for place, ranks in enumerate(self.groups[owner]) for rank in ranks}
            self._places[owner] = places
        if not is_whole(world_rank) or world_rank not in places:
            raise LayoutError(self._outside(owner, world_rank, places))
        return places[world_rank]

    def _outside(self, owner: str, world_rank: int, places: Mapping[int, int]) -> str:
        if not is_whole(world_rank):
            return f"world rank {show(world_rank)} is not a whole number; allowed: 0..{self.world_size - 1}"
        highest = max(places)
        if owner in self.local_numbering:
            width = highest + 1
            hint = ""
            if 0 <= world_rank < self.world_size:
                hint = f"; world rank {world_rank} is local rank {world_rank % width} of engine {world_rank // width}"
            return f"kind {owner!r} counts ranks inside one engine: 0..{width - 1}, not {show(world_rank)}{hint}"
        nearest = min(places, key=lambda rank: (abs(rank - world_rank), rank))
        held = "all" if len(places) == self.world_size else f"{len(places)} of {self.world_size}"
        return (
            f"world rank {show(world_rank)} is in no {owner!r} group; that kind holds {held} ranks, "
            f"{min(places)}..{highest}; nearest: {nearest}"
        )

    def _require_rank(self, world_rank: int) -> None:
        if not is_whole(world_rank) or not 0 <= world_rank < self.world_size:
            raise LayoutError(f"world rank {show(world_rank)} is not in the world; allowed: 0..{self.world_size - 1}")


def _find_rules(system: object) -> Rules:
    if not isinstance(system, str) or system not in SYSTEMS:
        raise LayoutError(
            f"no rules for system {show(system)}; {known_names(system, SYSTEMS, 'systems')}; "
            "GroupMap.custom takes the lists of any other program"
        )
    return SYSTEMS[system]


def _find_width_problem(rules: Rules, sizes: Sizes) -> str | None:
    world = rules.fill_in(sizes)["world"]
    if world > MAX_WORLD_SIZE:
        return f"a world of {show(world)} ranks is wider than a map can be; allowed: at most {MAX_WORLD_SIZE}"
    return None


def _freeze(system: str, sizes: Sizes, world_size: int, layout: Layout, launch_problem: str | None) -> GroupMap:
    ordered = dict.fromkeys(part.kind for parts in layout.loops for part in parts)
    groups = {kind: layout.groups[kind] for kind in ordered}
    return GroupMap(
        system=system,
        sizes=MappingProxyType(
            {name: MappingProxyType(value) if isinstance(value, dict) else value for name, value in sizes.items()}
        ),
        world_size=world_size,
        groups=MappingProxyType(groups),
        aliases=MappingProxyType(layout.aliases),
        absent=tuple(layout.absent),
        local_numbering=layout.local_numbering,
        launch_problem=launch_problem,
        digest=_digest(system, sizes, groups, layout.aliases),
        _origins=MappingProxyType(layout.origins),
        _grids=layout.grids,
        _loops=tuple(layout.loops),
    )


def _digest(system: str, sizes: Sizes, groups: Mapping[str, RankLists], aliases: Mapping[str, str]) -> str:
    """SHA-256 in hex over what makes the map: kinds and lists in creation order, sizes and aliases by name."""
    told = {"system": system, "sizes": sizes, "groups": list(groups.items()), "aliases": aliases}
    text = json.dumps(told, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _plain_sizes(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes as JSON knows them."""
    plain = {}
    for name, value in sizes.items():
        plain[name] = dict(value) if isinstance(value, Mapping) else list(value) if isinstance(value, tuple) else value
    return plain


def _without_reserved(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes from a document as keyword arguments; a name that `build` itself uses is no size of any system."""
    reserved = {"cls", "system", "launch_checks"} & set(sizes)
    if reserved:
        raise LayoutError(f"{sorted(reserved)[0]!r} is no size; a group map holds only its system's sizes")
    return dict(sizes)


def _is_told(name: str, value: Any, specs: Mapping[str, Any]) -> bool:
    return name != "world" and (name not in specs or value != specs[name].default)
