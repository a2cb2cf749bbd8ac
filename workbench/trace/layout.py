"""The bytes of a trace file, in one table that the writer and the reader both use. Little-endian.

    HEADER  4,096 bytes: magic, sizes, then a JSON object that never changes (host, pid, clock anchor, versions)
    WORDS   u64 words: bytes used in the table, entries lost, closing time, then events counted per group slot
    TABLE   JSON values, one a line, each written once: texts, shapes, groups, call sites. Line n has id n + 2
    RING    records of 80 bytes. Record number r lies at place r % capacity, so the newest ones stay

A record carries its number first and last. Bytes are written in this order, so a record that was cut short, or is being
overwritten while it is read, has two different numbers and is passed over.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

MAGIC = b"WBTRACE1"
HEADER_BYTES = 4096
PREFIX = struct.Struct(
    "<8sIIQQQQQQ"
)  # magic, record bytes, meta bytes, file, words at, table at, table bytes, ring at, places

WORD_TABLE_USED, WORD_TABLE_LOST, WORD_CLOSED_NS, WORD_SLOTS = 0, 1, 2, 8  # slot 0: events of no group

RECORD = struct.Struct("<QqqBBH44sQ")  # number + 1, time_ns, sequence, phase, flags, remark, what, number + 1
WHAT = struct.Struct(
    "<IIIIIIIIiii"
)  # ids of group, op, shape, dtype, path, reduce_op, stride_class, site; root x2, peer
EVENT = struct.Struct("<Qqq48sQ")  # RECORD as the writer packs it: the HEAD in the middle repeats from call to call
HEAD = struct.Struct("<BBH44s")  # phase, flags, remark, what
TEXT = struct.Struct("<QqqBBH44sQ")  # number + 1, number of its event, part, phase, flags, length, bytes, number + 1

PHASES = {"B": 1, "E": 2, "I": 3}
PHASE_TEXT = 4
FLAG_CAPTURE, FLAG_ERROR, FLAG_TEXT, FLAG_LAST_PART = 1, 2, 4, 8

ID_NONE, ID_LOST, ID_FIRST = 0, 1, 2  # an id that was lost had no room in the table
MAX_REMARK_ID = (1 << 16) - 1
NO_RANK = -(1 << 31)

TEXT_BYTES = 44
MAX_TEXT_BYTES = 44 * 64  # a longer note or error is cut, and says so

MIN_FILE_BYTES = 64 << 10
MAX_FILE_BYTES = 64 << 20


def with_phase(head: bytes, phase: int) -> bytes:
    """A packed HEAD, of another phase."""
    return bytes((phase,)) + head[1:]


def with_flag(head: bytes, flag: int) -> bytes:
    """A packed HEAD, with one more flag."""
    return bytes((head[0], head[1] | flag)) + head[2:]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of one file lie. Units: bytes, and `places` in records."""

    file_bytes: int
    words_at: int
    table_at: int
    table_bytes: int
    ring_at: int
    places: int

    @property
    def num_slots(self) -> int:
        """Counters for events of no group (slot 0), for one group each, and for all groups beyond (the last)."""
        return (self.table_at - self.words_at) // 8 - WORD_SLOTS

    @classmethod
    def of_size(cls, size_bytes: int) -> Layout:
        """A quarter for the table, a page or eight for the words, the rest for the ring."""
        words_bytes = 4096 if size_bytes < (1 << 20) else 32768
        table_at = HEADER_BYTES + words_bytes
        table_bytes = (size_bytes // 4) & ~4095
        ring_at = table_at + table_bytes
        return cls(size_bytes, HEADER_BYTES, table_at, table_bytes, ring_at, (size_bytes - ring_at) // RECORD.size)
