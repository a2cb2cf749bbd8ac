"""Lane: writes one group's calls on this rank. What repeats from call to call is packed once and kept."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from types import CodeType, FrameType
from typing import Any

from workbench.trace import layout as at
from workbench.trace.event import CallSite, GroupInfo
from workbench.trace.file_writer import TraceFile, Writer

Token = tuple[bytes, int]
"""What begin gives and end takes: the part of the end's record that is known by then, and the sequence number."""

Call = tuple[bytes, bytes, Iterator[int], Sequence[CodeType]]
"""A kind of call that was described before: the heads of its two records, the counter that numbers such calls, and the
code objects whose ids its key holds, kept so that these ids stay taken."""


class Lane:
    """One group's calls on this rank. `begin` and `end` together cost a few microseconds.

    A caller that counts them takes the same steps without the functions in between. It looks its call up in `known`,
    else asks `meet`; takes the next number, and keeps it as `latest` unless the call has a peer; and gives number and
    head to `write`, at the begin and at the end. The end's head and the number are the Token that `end` takes.
    """

    def __init__(
        self, file: TraceFile | None, info: GroupInfo | None, *, slot: int = 0, group_id: int = at.ID_NONE
    ) -> None:
        """Use Recorder.group."""
        self.info = info
        self.known: dict[Any, Call] = {}
        self.called_from: set[int] = set()
        self.write: Writer = _write_nothing if file is None else file.writer(slot)
        self.latest = 0
        self._file = file
        self._group_id = group_id
        self._calls = count(1)
        self._peer_calls: dict[tuple[str, int], Iterator[int]] = {}

    def begin(
        self,
        op: str,
        *,
        shape: tuple[int, ...] | None = None,
        dtype: str | None = None,
        path: str | None = None,
        reduce_op: str | None = None,
        root_group_rank: int | None = None,
        root_world_rank: int | None = None,
        peer_world_rank: int | None = None,
        stride_class: str | None = None,
        capture: bool = False,
        note: str = "",
        remark: str = "",
    ) -> Token | None:
        """Record that this rank enters a call, and give what `end` needs.

        One root number is enough: the other follows from the group. Give both to record what a program passed.
        A call with `peer_world_rank` (send, recv) is counted per operation and peer, and not in the group's sequence.
        `remark` opens the note of both events; it is for words that many calls share, and costs nothing a call.
        Shapes: `shape` and `dtype` are the input tensor's; stride_class() gives `stride_class`.
        """
        file = self._file
        if file is None or not file.live:
            return None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(file.inner_files):
            frame = frame.f_back
        key = (
            *(op, shape, dtype, path, reduce_op, root_group_rank, root_world_rank, peer_world_rank, stride_class),
            *((remark, capture, id(frame.f_code), frame.f_lasti) if frame is not None else (remark, capture)),
        )
        try:
            known = self.known[key]
        except (KeyError, TypeError):
            known = self._describe(key, key, frame)
        head, end_head, numbers, _ = known
        sequence = next(numbers)
        if numbers is self._calls:
            self.latest = sequence
        self.write(sequence, head, note)
        return end_head, sequence

    def end(self, token: Token | None, note: str = "", error: str = "", time_ns: int = 0) -> None:
        """Record that this rank leaves the call that gave `token`; `error` is the text of what it raised.

        time_ns: when it left, ns of the recorder's monotonic clock, if that is not now.
        """
        if token is None:
            return
        head, sequence = token
        if error:
            head = at.with_flag(head, at.FLAG_ERROR)
        self.write(sequence, head, error or note, time_ns)

    def instant(
        self,
        op: str,
        *,
        path: str | None = None,
        note: str = "",
        error: str = "",
        remark: str = "",
        site: CallSite | None = None,
    ) -> None:
        """Record something that has no length: a plan, a fallback, a state change."""
        file = self._file
        if file is None or not file.live:
            return
        frame: FrameType | None = None if site is not None else sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(file.inner_files):
            frame = frame.f_back
        key = (
            *(op, None, None, path, None, None, None, None, None),
            *((remark, False, id(frame.f_code), frame.f_lasti) if frame is not None else (remark, False, site)),
        )
        try:
            known = self.known[key]
        except (KeyError, TypeError):
            known = self._describe(key, key, frame, where=site)
        head = at.with_phase(known[0], at.PHASES["I"])
        if error:
            head = at.with_flag(head, at.FLAG_ERROR)
        self.write(self.latest, head, error or note)

    def meet(
        self,
        key: tuple[Any, ...],
        frame: FrameType | None,
        describe: Callable[..., Mapping[str, Any]],
        told: tuple[Any, ...],
    ) -> Call:
        """What `known` does not hold yet: describe(key, *told) gives begin's fields.

        key: whatever the fields depend on, and the instruction of `frame`, where to look for the caller. Where that is
        an inner one, the caller's line and its callers are made part of the key; where it is a function that other
        files call, its callers are, and the id of its code is in `called_from` from then on: whoever looks up `known`
        adds callers_key for such a frame. A key that cannot be hashed is described afresh each time.
        """
        file = self._file
        if file is None or not file.live:
            return b"", b"", count(1), ()
        codes = [] if frame is None else [frame.f_code]
        called, line = key, frame
        while line is not None and line.f_code.co_filename.startswith(file.inner_files):
            line = line.f_back
        if line is not None and line is not frame:
            codes.append(line.f_code)
            key = (*key, id(line.f_code), line.f_lasti, callers_key(line))
            with contextlib.suppress(KeyError, TypeError):
                return self.known[key]
        above = _above(line)
        callers = _callers(line, above, file.inner_files)
        if callers and line is frame and line is not None and id(line.f_code) not in self.called_from:
            self.called_from.add(id(line.f_code))
            key = (*key, callers_key(line))
        codes += [caller.f_code for caller in above]
        fields = describe(called, *told)
        return self._describe(key, [fields.get(name) for name in _DESCRIBED], line, codes=codes, callers=callers)

    @contextlib.contextmanager
    def span(self, op: str, **fields: Any) -> Iterator[None]:
        """begin and end around a block; an exception is recorded and goes on. `fields` are those of begin."""
        token = self.begin(op, **fields)
        try:
            yield
        except BaseException as e:
            self.end(token, error=f"{type(e).__name__}: {e}")
            raise
        self.end(token)

    def _describe(
        self,
        key: tuple[Any, ...],
        fields: Sequence[Any],
        frame: FrameType | None,
        *,
        where: CallSite | None = None,
        codes: Sequence[CodeType] = (),
        callers: Sequence[FrameType] = (),
    ) -> Call:
        """The parts of a call's records that repeat from call to call. `fields` begin with _DESCRIBED."""
        assert self._file is not None
        op, shape, dtype, path, reduce_op, root_group_rank, root_world_rank, peer, strides, remark, capture, *_ = fields
        if self.info is not None and root_world_rank is None and root_group_rank is not None:
            root_world_rank = _at(self.info.world_ranks, root_group_rank)
        elif self.info is not None and root_group_rank is None and root_world_rank in self.info.world_ranks:
            root_group_rank = self.info.world_ranks.index(root_world_rank)
        site: dict[str, Any] | None = None
        if frame is not None:
            site = {"site": _place(frame)} | ({"callers": [_place(caller) for caller in callers]} if callers else {})
        elif where is not None:
            site = {"site": [where.function, where.file, where.line]}
        add = self._file.add
        what = at.WHAT.pack(
            *(self._group_id, add(str(op)), add(None if shape is None else [_number(n) for n in shape])),
            *(add(_text(dtype)), add(_text(path)), add(_text(reduce_op)), add(_text(strides)), add(site)),
            *(_rank(root_group_rank), _rank(root_world_rank), _rank(peer)),
        )
        remark_id = add(str(remark)) if remark else 0
        if remark_id > at.MAX_REMARK_ID:
            remark_id = at.ID_LOST
        if len(self.known) >= _MOST_KNOWN:
            self.known.clear()
        head = at.HEAD.pack(at.PHASES["B"], at.FLAG_CAPTURE if capture else 0, remark_id, what)
        numbers = self._calls if peer is None else self._peer_calls.setdefault((op, peer), count(1))
        codes = codes or (() if frame is None else (frame.f_code,))
        known = head, at.with_phase(head, at.PHASES["E"]), numbers, codes
        with contextlib.suppress(TypeError):  # a list for a shape: described afresh each time
            self.known[key] = known
        return known


def callers_key(frame: FrameType | None) -> tuple[int, ...]:
    """What tells apart the ways by which `frame` was called, a few steps up."""
    key: list[int] = []
    above = None if frame is None else frame.f_back
    for _ in _STEPS:
        if above is None:
            break
        key += id(above.f_code), above.f_lasti
        above = above.f_back
    return tuple(key)


def _above(frame: FrameType | None) -> list[FrameType]:
    """The frames that callers_key looks at."""
    found: list[FrameType] = []
    for _ in _STEPS:
        frame = None if frame is None else frame.f_back
        found += [] if frame is None else [frame]
    return found


def _callers(frame: FrameType | None, above: Sequence[FrameType], inner_files: tuple[str, ...]) -> list[FrameType]:
    """Of those above `frame`, up to where its module or its process starts: the innermost of each file but its own."""
    if frame is None or frame.f_code.co_name == "<module>":
        return []
    by_file = {frame.f_code.co_filename: frame}
    for caller in above:
        if caller.f_code.co_filename.startswith(_STARTERS):
            break
        by_file.setdefault(caller.f_code.co_filename, caller)
        if caller.f_code.co_name == "<module>":
            break
    return [c for file, c in by_file.items() if c is not frame and not file.startswith(inner_files)][:_MOST_CALLERS]


def _place(frame: FrameType) -> list[Any]:
    return [frame.f_code.co_qualname, frame.f_code.co_filename, frame.f_lineno]


_STARTERS = (*(f"{p}/" for m in (multiprocessing, concurrent.futures) for p in m.__path__), threading.__file__)
_STEPS = range(9)  # frames above a call: a wrapper or two, torch's modules between them, and what is of interest
_MOST_CALLERS = 3
_DESCRIBED = (
    *("op", "shape", "dtype", "path", "reduce_op", "root_group_rank", "root_world_rank"),
    *("peer_world_rank", "stride_class", "remark", "capture"),
)  # the fields that _describe takes, in its order
_MOST_KNOWN = 4096  # descriptions a lane keeps before it starts afresh


def _write_nothing(sequence: int, head: bytes, text: str, time_ns: int = 0) -> None:
    """Of a recorder that is off."""


def _at(ranks: tuple[int, ...], place: Any) -> int | None:
    return ranks[place] if isinstance(place, int) and 0 <= place < len(ranks) else None


def _rank(value: Any) -> int:
    return value if isinstance(value, int) and -(1 << 31) < value < (1 << 31) else at.NO_RANK


def _number(value: Any) -> int:
    """A dim as a plain int; -1 for a size that is only a symbol while torch compiles."""
    return value if type(value) is int else -1


def _text(value: Any) -> str | None:
    return value if value is None else str(value)
