"""Tables: which algorithm serves which message size, by architecture and world size. Data with provenance, no rules.

A table's world sizes are what is supported: no `if` anywhere says that eight ranks work and twelve do not. Each of
2..16 is a key or a reasoned absence. In a table file (tables/*.json), sizes are "384K" or "1.125M", and the rows of a
mode are tried in order: a row serves a message of `from` to `up_to` bytes a rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

from workbench.documents import Document, parse_document, read_document
from workbench.plan.blocks import count_blocks
from workbench.plan.plan import Standing

WORLD_SIZES = range(2, 17)
SHIPPED = ("sm90", "sm100")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}
_PROVENANCE = ("device", "date", "driver", "source", "command")


class Algorithm(Enum):
    """push: every rank stores its rows into every peer's slots.   pull: every rank reads all peers' rows.
    stream: push with few rows on the way.   two_shot_*: reduce a share each, then hand it out.
    multicast: two_shot_pull through the switch's adders; needs the multicast capability."""

    PUSH = "push"
    STREAM = "stream"
    PULL = "pull"
    TWO_SHOT_PUSH = "two_shot_push"
    TWO_SHOT_PULL = "two_shot_pull"
    MULTICAST = "multicast"


EVERY_KERNEL = frozenset(Algorithm)
"""As if a kernel had been written for each algorithm: what tables and links alone decide."""

BUILT_KERNELS = frozenset({Algorithm.PUSH, Algorithm.TWO_SHOT_PUSH})
"""The algorithms that kernels_ext/cuda has kernels for. Tables may run ahead of them."""


class Mode(Enum):
    """graph, eager: all-reduce alone, captured or not.   fused: all-reduce + add + RMSNorm in one kernel."""

    GRAPH = "graph"
    EAGER = "eager"
    FUSED = "fused"


@dataclass(frozen=True, slots=True)
class Row:
    """One algorithm and the message sizes it serves, both ends included, in bytes a rank."""

    algorithm: Algorithm
    from_bytes: int
    up_to_bytes: int
    standing: Standing | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """What a table says of one world size: rows by mode, in the order they are tried, and blocks by algorithm.

    A row has the table's standing unless it says its own; `provenance` is then where such rows come from, else empty.
    max_message_bytes: the table's, unless the entry says its own.
    """

    rows: Mapping[Mode, tuple[Row, ...]]
    blocks: Mapping[Algorithm, str]
    max_message_bytes: int
    provenance: Mapping[str, str] = field(default_factory=dict)

    def count_blocks(self, algorithm: Algorithm, *, sms: int, ws: int) -> int:
        return count_blocks(self.blocks[algorithm], sms=sms, ws=ws)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table file. `arches` are the architectures it speaks for; `absent` gives a reason for each size without key.

    max_message_bytes: above it the path does not go, whatever the rows say; it bounds the workspace. An entry may say
    its own.   standing: MEASURED if the rows were timed on such a machine by this package, DEFAULT if they come from
    elsewhere; a row may say its own, with the provenance in its entry.
    """

    name: str
    arches: tuple[str, ...]
    standing: Standing
    provenance: Mapping[str, str]
    max_message_bytes: int
    entries: Mapping[int, Entry]
    absent: Mapping[int, str]


def parse_table(doc: Document) -> Table:
    """The table in a document. Raises ArgumentError naming the field, or a size neither key nor absent."""
    doc.take_whole("schema", 1, 1)
    provenance = _provenance(doc)
    most = _size(doc, "max_message")
    entries = doc.take_child("world_sizes")
    absent = doc.take_child("absent")
    table = Table(
        name=doc.take_text("table", at_most=64),
        arches=doc.take_texts("arches", at_most=8),
        standing=doc.take_choice("standing", Standing),
        provenance=provenance,
        max_message_bytes=most,
        entries=MappingProxyType({int(ws): _entry(entries.take_child(ws), most) for ws in _world_sizes(entries)}),
        absent=MappingProxyType({int(ws): absent.take_text(ws) for ws in _world_sizes(absent)}),
    )
    if table.standing is Standing.UNSUPPORTED:
        doc.refuse("standing is default or measured; an unsupported size is an absence")
    for ws in WORLD_SIZES:
        if (ws in table.entries) == (ws in table.absent):
            doc.refuse(f"world size {ws} must be a key of world_sizes, or of absent with its reason, and not both")
    doc.end()
    return table


def read_table(path: str | Path) -> Table:
    """The table in a file, such as `workbench tune` writes. Raises ArgumentError as parse_table."""
    return parse_table(read_document(path))


@cache
def shipped_tables() -> Mapping[str, Table]:
    """The shipped tables by architecture; a table that speaks for two stands under both."""
    tables = [parse_table(_shipped(f"{name}.json")) for name in SHIPPED]
    return MappingProxyType({arch: table for table in tables for arch in table.arches})


def show_bytes(size: int) -> str:
    """'14 KiB', '1.125 MiB', '100 bytes': the short exact form where there is one, else rounded to a tenth."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            value = size / unit
            return f"{value:g} {name}" if value * 1000 % 1 == 0 else f"{value:.1f} {name}"
    return f"{size} bytes"


def _shipped(name: str) -> Document:
    return parse_document((files("workbench.plan") / "tables" / name).read_text(encoding="utf-8"), name)


def _world_sizes(doc: Document) -> tuple[str, ...]:
    for name in doc.names():
        if not (name.isascii() and name.isdigit() and len(name) < 3 and int(name) in WORLD_SIZES and name[0] != "0"):
            doc.refuse(f"field {name[:20]!r} is no world size; allowed: {WORLD_SIZES[0]}..{WORLD_SIZES[-1]}")
    return doc.names()


def _provenance(doc: Document) -> Mapping[str, str]:
    origin = doc.take_child("provenance")
    provenance = {name: origin.take_text(name) for name in _PROVENANCE}
    origin.end()
    return MappingProxyType(provenance)


def _entry(doc: Document, max_message_bytes: int) -> Entry:
    rows = {mode: tuple(_row(row) for row in doc.take_children(mode.value)) for mode in Mode}
    by_algorithm = doc.take_child("blocks")
    blocks = {Algorithm(a): by_algorithm.take_text(a) for a in (a.value for a in Algorithm) if by_algorithm.has(a)}
    by_algorithm.end()
    most = _size(doc, "max_message") if doc.has("max_message") else max_message_bytes
    provenance: Mapping[str, str] = _provenance(doc) if doc.has("provenance") else MappingProxyType({})
    doc.end()
    for row in (row for mode_rows in rows.values() for row in mode_rows):
        if row.standing is not None and not provenance:
            doc.refuse(f"provenance is missing, and must say where a row that is {row.standing.value} comes from")
        if row.algorithm not in blocks:
            doc.refuse(f"blocks has no {row.algorithm.value}, which a row uses")
    for expression in blocks.values():
        count_blocks(expression, sms=132, ws=8)
    return Entry(MappingProxyType(rows), MappingProxyType(blocks), most, provenance)


def _row(doc: Document) -> Row:
    row = Row(
        doc.take_choice("algorithm", Algorithm),
        _size(doc, "from") if doc.has("from") else 0,
        _size(doc, "up_to"),
        doc.take_choice("standing", Standing) if doc.has("standing") else None,
    )
    doc.end()
    if row.from_bytes > row.up_to_bytes:
        doc.refuse("from is above up_to")
    if row.standing is Standing.UNSUPPORTED:
        doc.refuse("standing is default or measured; an unsupported size is an absence")
    return row


def _size(doc: Document, name: str) -> int:
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)([KM]?)", doc.take_text(name, at_most=16))
    size = Fraction(match[1]) * _UNITS[match[2]] if match else None
    if size is None or size.denominator != 1:
        doc.refuse(f"{name} must be whole bytes such as 131072, 128K or 1.125M")
    return int(size)
