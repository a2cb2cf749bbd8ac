"""Event: one thing that happened on one rank, and the records it is made of. No clock, no file, no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from workbench.errors import WorkbenchError
from workbench.ranks import GroupKey

Json = Any  # None, bool, int, float, str, and lists and dicts of these


class TraceError(WorkbenchError, ValueError):
    """A trace file or dump that cannot be read. The text names the file and what was found in it."""


class Phase(Enum):
    """A call's begin and end are two events; an instant stands alone."""

    BEGIN = "B"
    END = "E"
    INSTANT = "I"


BY_HAND = "by-hand"
"""The kind of a group that a program made by itself, of a store and numbers: see GroupInfo."""


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A group as a rank saw it: who is in it, what it is called, and its place among the groups this rank made.

    `ordinal` counts the groups this rank created, `generation` the rebuilds of all groups in the same processes.
    Equal groups of two ranks have equal `key`, `label` and `generation`; unequal ordinals are a finding.
    Of the kind BY_HAND, which torch does not count among its groups, nothing tells the members' world ranks: there
    `world_ranks` are 0, 1, ..., `label` says where the members meet, and `ordinal` is this rank's number among them.
    """

    key: GroupKey
    label: str
    ordinal: int
    generation: int = 0

    @property
    def world_ranks(self) -> tuple[int, ...]:
        return self.key.world_ranks

    def to_json(self) -> dict[str, Json]:
        return {
            "kind": self.key.kind,
            "world_ranks": list(self.key.world_ranks),
            "label": self.label,
            "ordinal": self.ordinal,
            "generation": self.generation,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> GroupInfo:
        """The inverse of to_json. Raises TraceError where a field is absent or of another type."""
        key = GroupKey(_text(data, "kind"), _ints(data.get("world_ranks"), "world_ranks"))
        return cls(key, _text(data, "label"), _int(data, "ordinal"), _int(data, "generation"))

    def __str__(self) -> str:
        name = str(self.key) if self.label in ("", self.key.kind) else f"{self.label}={self.key}"
        return name if self.generation == 0 else f"{name} generation {self.generation}"


_CELL_FILE = re.compile(r".*[/\\]ipykernel_\d+[/\\]\w+\.py")  # as ipykernel names them


@dataclass(frozen=True, slots=True)
class CallSite:
    """The line that made a call: the first frame outside the recording rooms of this package and outside torch.

    A cell of a notebook has a file of its own, by a name that says nothing to its author: there it is "cell, line 3".
    callers: who called that function from other files, innermost first: a few, for what stands in a wrapper. They make
        no difference between two sites.
    """

    function: str
    file: str
    line: int
    callers: tuple[CallSite, ...] = field(default=(), compare=False)

    @property
    def in_cell(self) -> bool:
        """Whether the line stands in a cell of a notebook."""
        return _CELL_FILE.fullmatch(self.file) is not None

    def __str__(self) -> str:
        return " from ".join(map(CallSite._words, (self, *self.callers)))

    def _words(self) -> str:
        if not self.in_cell:
            return f"{self.function} ({self.file}:{self.line})"
        return (
            f"cell, line {self.line}" if self.function == "<module>" else f"cell, in {self.function}, line {self.line}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of one rank.

    Units: time_ns is the rank's monotonic clock in a RankTrace, nanoseconds since 1970 in a Trace (aligned).
    `ordinal` is the event's place among all records of its rank. `sequence` is the ordinal of the call in its group,
    from 1; a point-to-point call (it has peer_world_rank) counts per operation and peer instead, so that the n-th send
    meets the n-th recv; an instant carries the sequence of the latest call begun on its group, 0 before the first.
    `root_group_rank` is the place in `group.world_ranks`. `shape` and `dtype` are those of the input tensor.
    """

    time_ns: int
    world_rank: int
    phase: Phase
    op: str
    ordinal: int = 0
    sequence: int = 0
    group: GroupInfo | None = None
    root_group_rank: int | None = None
    root_world_rank: int | None = None
    peer_world_rank: int | None = None
    reduce_op: str | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    stride_class: str | None = None
    path: str | None = None
    capture: bool = False
    site: CallSite | None = None
    note: str = ""
    error: str = ""

    def moved(self, offset_ns: int) -> Event:
        """The same event, offset_ns later."""
        return self.repeated(self.time_ns + offset_ns, self.ordinal, self.sequence, self.note, self.error)

    def repeated(self, time_ns: int, ordinal: int, sequence: int, note: str, error: str) -> Event:
        """This event at another time. A trace holds a million: this takes a tenth of what dataclasses.replace takes."""
        event: Any = _Draft()
        event.time_ns = time_ns
        event.world_rank = self.world_rank
        event.phase = self.phase
        event.op = self.op
        event.ordinal = ordinal
        event.sequence = sequence
        event.group = self.group
        event.root_group_rank = self.root_group_rank
        event.root_world_rank = self.root_world_rank
        event.peer_world_rank = self.peer_world_rank
        event.reduce_op = self.reduce_op
        event.shape = self.shape
        event.dtype = self.dtype
        event.stride_class = self.stride_class
        event.path = self.path
        event.capture = self.capture
        event.site = self.site
        event.note = note
        event.error = error
        event.__class__ = Event
        return event  # type: ignore[no-any-return]  # an Event from here on

    def to_json(self) -> dict[str, Json]:
        """Fields that say something, in a fixed order."""
        data: dict[str, Json] = {
            "time_ns": self.time_ns,
            "world_rank": self.world_rank,
            "phase": self.phase.value,
            "op": self.op,
            "ordinal": self.ordinal,
            "sequence": self.sequence,
        }
        if self.group is not None:
            data["group"] = self.group.to_json()
        for name in _OPTIONAL:
            value = getattr(self, name)
            if value is not None:
                data[name] = value
        if self.shape is not None:
            data["shape"] = list(self.shape)
        if self.capture:
            data["capture"] = True
        if self.site is not None:
            data["site"] = _site_fields(self.site)
            if self.site.callers:
                data["site"]["callers"] = [_site_fields(caller) for caller in self.site.callers]
        for name in ("note", "error"):
            if getattr(self, name):
                data[name] = getattr(self, name)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Event:
        """The inverse of to_json. Raises TraceError where a field is absent or of another type."""
        if not isinstance(data, Mapping):
            raise TraceError(f"an event is an object, found {type(data).__name__}")
        try:
            phase = Phase(data.get("phase"))
        except ValueError:
            raise TraceError(f"an event's phase is B, E or I, found {data.get('phase')!r}") from None
        group, site, shape = data.get("group"), data.get("site"), data.get("shape")
        return cls(
            time_ns=_int(data, "time_ns"),
            world_rank=_int(data, "world_rank"),
            phase=phase,
            op=_text(data, "op"),
            ordinal=_int(data, "ordinal"),
            sequence=_int(data, "sequence"),
            group=None if group is None else GroupInfo.from_json(_object(group, "group")),
            root_group_rank=_int(data, "root_group_rank") if "root_group_rank" in data else None,
            root_world_rank=_int(data, "root_world_rank") if "root_world_rank" in data else None,
            peer_world_rank=_int(data, "peer_world_rank") if "peer_world_rank" in data else None,
            reduce_op=_text(data, "reduce_op") if "reduce_op" in data else None,
            shape=None if shape is None else _ints(shape, "shape"),
            dtype=_text(data, "dtype") if "dtype" in data else None,
            stride_class=_text(data, "stride_class") if "stride_class" in data else None,
            path=_text(data, "path") if "path" in data else None,
            capture=data.get("capture") is True,
            site=None if site is None else _site(_object(site, "site")),
            note=_text(data, "note") if "note" in data else "",
            error=_text(data, "error") if "error" in data else "",
        )

    def __str__(self) -> str:
        where = "" if self.group is None else f" {self.group} #{self.sequence}"
        shape = "" if self.shape is None else f" {'x'.join(map(str, self.shape)) or 'scalar'}"
        words = [w for w in (self.dtype, self.reduce_op, self.path and f"path={self.path}") if w]
        tail = "".join(f" {w}" for w in words)
        text = f" {self.error or self.note}" if self.error or self.note else ""
        site = "" if self.site is None else f" at {self.site}"
        return f"rank {self.world_rank} {self.phase.value} {self.op}{where}{shape}{tail}{text}{site}"


class _Draft:
    """An Event while it is filled in: a frozen one takes each field by a call."""

    __slots__ = Event.__slots__


def stride_class(shape: Sequence[int], strides: Sequence[int]) -> str:
    """How a tensor lies in memory: "contiguous", "dense(1,0)" with the dims from outermost to innermost, or "strided".

    "strided" has gaps or overlaps: a library that copies a dense block would touch memory outside the view.
    Dims of size 1 say nothing and count as in order. Units: strides in elements.
    """
    if any(n == 0 for n in shape):
        return "contiguous"
    wide = [d for d in range(len(shape)) if shape[d] != 1]
    order = sorted(wide, key=lambda d: (-strides[d], d))
    expected = 1
    for d in reversed(order):
        if strides[d] != expected:
            return "strided"
        expected *= shape[d]
    return "contiguous" if order == wide else f"dense({','.join(map(str, order))})"


_OPTIONAL = (
    *("root_group_rank", "root_world_rank", "peer_world_rank"),
    *("reduce_op", "dtype", "stride_class", "path"),
)


def _int(data: Mapping[str, Json], name: str) -> int:
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TraceError(f"{name} is a whole number, found {value!r:.80}")
    return value


def _text(data: Mapping[str, Json], name: str) -> str:
    value = data.get(name)
    if not isinstance(value, str):
        raise TraceError(f"{name} is a text, found {value!r:.80}")
    return value


def _ints(value: Json, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(n, int) and not isinstance(n, bool) for n in value):
        raise TraceError(f"{name} is a list of whole numbers, found {value!r:.80}")
    return tuple(value)


def _object(value: Json, name: str) -> Mapping[str, Json]:
    if not isinstance(value, Mapping):
        raise TraceError(f"{name} is an object, found {value!r:.80}")
    return value


def _site(data: Mapping[str, Json]) -> CallSite:
    callers = data.get("callers", [])
    if not isinstance(callers, list):
        raise TraceError(f"callers {callers!r:.80}; expected a list of sites")
    return CallSite(
        *(_text(data, "function"), _text(data, "file"), _int(data, "line")),
        callers=tuple(_site(_object(caller, "caller")) for caller in callers),
    )


def _site_fields(site: CallSite) -> dict[str, Json]:
    return {"function": site.function, "file": site.file, "line": site.line}
