"""Backend `shm`: our kernel over POSIX shared memory, for ranks of one host.

The protocol is drawn in kernels_ext/README.md. Python creates and maps the segments and decides whom to blame; the
kernel moves data and waits. It comes back at least every 100 ms of sleep, so that Ctrl-C works and dead peers are seen.
"""

from __future__ import annotations

import ctypes
import os
import select
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import torch

from workbench.backends.arena import Arena
from workbench.backends.base import Channel, Json, Request, Room, Verdict, limits_of
from workbench.backends.build import build_cpu, find_compiler, why_no_compiler
from workbench.backends.calls import call_text, mismatch_error
from workbench.backends.forks import refuse_in_children
from workbench.backends.places import host_id
from workbench.backends.segments import (
    SEGMENT_DIRECTORY,
    OwnSegment,
    Segment,
    map_segment,
    process_lives,
    start_time_of,
    sweep_segments,
)
from workbench.backends.shm_library import (
    ABI_VERSION,
    DTYPE_CODES,
    MAX_RANKS,
    OP_CODES,
    ROUNDING_CODES,
    CallWords,
    Cause,
    Config,
    Failure,
    Layout,
    Status,
    load_library,
)
from workbench.backends.vote import vote
from workbench.errors import (
    ArgumentError,
    ClosedError,
    DeadlineError,
    PeerDeadError,
    ResourceError,
    WorkbenchError,
)
from workbench.ops import FusedOutput, Op, check_all_reduce, check_empty, check_fused
from workbench.ranks import GroupKey

NAME = "shm"
ARENA_BUFFERS = 2  # tensors of max_tokens that `empty` can give at once: one in use, one being filled
SLICE_S = 0.1  # longest sleep inside the kernel
_DTYPE_NAMES = {code: str(dtype).removeprefix("torch.") for dtype, code in DTYPE_CODES.items()}
_OP_NAMES = {code: op.value for op, code in OP_CODES.items()}


def probe(request: Request, key: GroupKey) -> Verdict:
    """Whether this process could serve the group: size, dtype, compiler, /dev/shm. Local, compiles nothing."""
    if key.size > MAX_RANKS:
        return Verdict(False, f"{key.size} ranks; the shared-memory kernel serves 1 to {MAX_RANKS}")
    if request.dtype not in DTYPE_CODES:
        return Verdict(False, f"{request.dtype}; the shared-memory kernel serves bfloat16, float16 and float32")
    if find_compiler() is None:
        return Verdict(False, why_no_compiler())
    if key.size > 1 and not os.access(SEGMENT_DIRECTORY, os.W_OK):
        return Verdict(False, f"{SEGMENT_DIRECTORY} is missing or not writable")
    return Verdict(True, f"shared memory of one host, {key.size} ranks")


def room(request: Request, key: GroupKey) -> Room:
    """The bytes of this rank's segment; none for a group of one. Local; compiles the kernel if it has to."""
    return Room(shm=_layout(build_cpu(), request).segment_bytes if key.size > 1 else 0)


def bind(channel: Channel, request: Request) -> ShmWorkspace:
    """Create this rank's segment, exchange names, map the peers' segments.

    Collective: every member of the channel's group.
    Raises: ResourceError, alike on every member and with nothing left behind, if one member has no kernel, no room in
        /dev/shm, another host or another /dev/shm, or cannot map a peer.
    """
    key = channel.key
    if key.size == 1:
        return ShmWorkspace(channel, request, build_cpu(), None, [], [])
    with ExitStack() as undo:
        mine: list[OwnSegment] = []
        undo.callback(sweep_segments)  # a member that died in between leaves its segment to the others
        undo.callback(mine.clear)  # or the traceback of a failure would keep the memory mapped
        sweep_segments()

        def allocate() -> Json:
            library = build_cpu()
            layout = _layout(library, request)
            segment = OwnSegment(layout.segment_bytes)
            undo.callback(segment.close)
            mine.append(segment)
            load_library(library).wbk_format_segment(
                segment.address, layout, request.hidden, DTYPE_CODES[request.dtype]
            )
            return {
                "name": segment.name,
                "pid": os.getpid(),
                "started": start_time_of(os.getpid()),
                "host": _host(),
                "kernels": library.name,
            }

        told = vote(channel, "shared memory", allocate)
        _require_equal(channel, told)

        made: list[ShmWorkspace] = []

        def attach() -> Json:
            library = build_cpu()
            layout = _layout(library, request)
            with ExitStack() as watches:
                peers: list[Segment] = []
                watched: list[tuple[int, int]] = []
                for group_rank, answer in enumerate(told):
                    if key.world_ranks[group_rank] == channel.world_rank:
                        peers.append(mine[0])
                        continue
                    peers.append(_map_peer(library, answer["name"], layout, request))
                    if answer["pid"] != os.getpid():
                        fd = _watch(answer["pid"], answer["started"])
                        watches.callback(os.close, fd)
                        watched.append((fd, group_rank))
                made.append(ShmWorkspace(channel, request, library, mine[0], peers, watched))
                watches.pop_all()  # the workspace closes them
            return None

        undo.callback(lambda: made.pop().close() if made else None)
        vote(channel, "mapping the peers' shared memory", attach)
        mine[0].unlink()
        undo.pop_all()
        return made[0]


class ShmWorkspace:
    """One rank's end of a group. See backends.base.Workspace for the calls."""

    backend = NAME

    def __init__(
        self,
        channel: Channel,
        request: Request,
        library_path: Path,
        own: OwnSegment | None,
        segments: list[Segment],
        watched: list[tuple[int, int]],
    ) -> None:
        library = load_library(library_path)
        self.request = request
        self._channel = channel
        self._key = channel.key
        self._timeout_s = channel.timeout_s
        self._limits = limits_of(channel, request, "cpu")
        self._story = ""  # why this workspace serves no more
        self._library = library
        self._run_sum = library.wbk_all_reduce
        self._run_fused = library.wbk_all_reduce_add_rms_norm
        self._segments = segments
        self._watched = dict(watched)
        self._poll = select.poll()
        for fd in self._watched:
            self._poll.register(fd, select.POLLIN)
        layout = _layout(library_path, request)
        self.size_bytes = layout.segment_bytes if own is not None else 0
        self._arena = (
            Arena(own.memory, offset=layout.arena_offset, size_bytes=layout.arena_bytes, name=self._limits.who())
            if own is not None
            else None
        )
        config = Config(
            abi_version=ABI_VERSION,
            num_ranks=channel.key.size,
            group_rank=channel.key.group_rank(channel.world_rank),
            dtype=DTYPE_CODES[request.dtype],
            rounding=ROUNDING_CODES[request.rounding],
            hidden=request.hidden,
            arena_bytes=_arena_bytes(request),
            timeout_ns=int(channel.timeout_s * 1e9),
            slice_ns=int(SLICE_S * 1e9),
        )
        config.num_spins, config.num_yields = _patience(channel.key.size)
        for group_rank, segment in enumerate(segments):
            config.segments[group_rank] = segment.address
        self._context = library.wbk_open(config)
        if not self._context:
            raise ResourceError(f"{self._limits.who()}: the kernel refused {request}")
        self._release = weakref.finalize(
            self, _release, os.getpid(), library, self._context, own, segments, [fd for fd, _ in watched]
        )
        refuse_in_children(self)

    @property
    def broken(self) -> str:
        """Why this workspace serves no more, or ''."""
        return self._story

    def refuse(self, reason: str) -> None:
        """Serve no more, for this reason. Local."""
        self._story = self._story or f"{self._limits.who()}: {reason}"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the group, fp32 in group_rank order, rounded once."""
        if self._story:
            raise ClosedError(self._story)
        tokens = check_all_reduce(self._limits, x)
        try:
            out = torch.empty_like(x)
            status = self._run_sum(self._context, tokens, x.data_ptr(), out.data_ptr())
            if status:
                self._see_through(status)
        except BaseException as e:
            self._after(Op.ALL_REDUCE, e)
            raise
        return out

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float, weight_bias: float
    ) -> FusedOutput:
        """The sum over the group plus residual, and its RMS norm, in one pass over each row."""
        if self._story:
            raise ClosedError(self._story)
        tokens = check_fused(self._limits, x, residual, weight, eps, weight_bias)
        try:
            norm = torch.empty_like(x)
            out = torch.empty_like(x)
            status = self._run_fused(
                self._context,
                tokens,
                x.data_ptr(),
                residual.data_ptr(),
                weight.data_ptr(),
                out.data_ptr(),
                norm.data_ptr(),
                eps,
                weight_bias,
            )
            if status:
                self._see_through(status)
        except BaseException as e:
            self._after(Op.ALL_REDUCE_ADD_RMS_NORM, e)
            raise
        return FusedOutput(norm, out)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor that peers read in place. Local. Raises CapacityError when the arena is full."""
        if self._story:
            raise ClosedError(self._story)
        check_empty(self._limits, shape, dtype)
        if self._arena is None:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return self._arena.empty(tuple(shape), dtype)

    def close(self) -> None:
        """Leave the group and give the memory back; tensors from `empty` stay readable. Local; may be called twice."""
        self.refuse("the workspace is closed; prepare the group again")
        self._release()
        self._segments = []
        self._arena = None

    def _see_through(self, status: int) -> None:
        """Go on with a call that paused, until it is done; raise what it failed for."""
        while status == Status.AGAIN:
            story = self._channel.story()
            if story is None:
                self._leave_if_peer_died()
            status = self._library.wbk_resume(self._context)
            if status == Status.AGAIN and story is not None:  # a member left outside this call and will not come
                self._library.wbk_leave(self._context, Cause.INTERRUPTED, 0)
                self._break(str(story))
                raise story
        if status == Status.OK:
            return
        if status == Status.BUSY:
            raise ArgumentError(
                f"{self._limits.who()}: another call is not over yet, of another thread or of what a signal handler "
                f"interrupts; a workspace serves one call at a time"
            )
        self._raise_failure()

    def _leave_if_peer_died(self) -> None:
        ended = self._poll.poll(0) if self._watched else []
        mask = sum(1 << self._watched[fd] for fd, _ in ended) & self._library.wbk_missing(self._context)
        if mask:
            self._library.wbk_leave(self._context, Cause.PEER_DEAD, mask)
            self._raise_failure()

    def _after(self, op: Op, error: BaseException) -> None:
        """An error from outside leaves the call half done: the workspace is broken, and the peers are told.

        Raises: what every member is to raise, for an error that nobody foresaw; Ctrl-C is the caller's alone.
        """
        if isinstance(error, WorkbenchError):
            return
        told = self._channel.fail(op.value, error) if isinstance(error, Exception) else None
        self._library.wbk_leave(self._context, Cause.INTERRUPTED, 0)
        self._break(f"a call was interrupted by {type(error).__name__}")
        if told is not None:
            raise told from error

    def _break(self, story: str) -> None:
        self.refuse(f"the workspace is broken by an earlier failure: {story}; rebuild it")

    def _raise_failure(self) -> NoReturn:
        failure = Failure()
        self._library.wbk_failure_of(self._context, failure)
        left = failure.cause in (Cause.CLOSED, Cause.INTERRUPTED, Cause.PEER_DEAD)
        error = (self._channel.story() if left else None) or self._explain(failure)
        self._break(str(error))
        raise error

    def _explain(self, failure: Failure) -> WorkbenchError:
        """The exception for a failure record. Its text is the same on every rank that meets the same record."""
        reporter = self._key.world_ranks[failure.reporter]
        blamed = tuple(w for g, w in enumerate(self._key.world_ranks) if failure.mask >> g & 1)
        ranks = f"world rank{'s' if len(blamed) > 1 else ''} {', '.join(map(str, blamed))}"
        call = f"{self._key}: call {failure.epoch}"
        doing = f"{call} ({_describe(failure.reporter_call)})"
        if failure.cause == Cause.DEADLINE:
            return DeadlineError(
                f"{doing}: world rank {reporter} waited {self._timeout_s:g} s for {ranks}; every member must make the "
                f"same calls in the same order; look what {ranks} did instead, or raise timeout_s",
                missing=blamed,
            )
        if failure.cause == Cause.PEER_DEAD:
            return PeerDeadError(
                f"{doing}: the process of {ranks} ended while world rank {reporter} waited for it; "
                f"look at its own error first",
                dead=blamed,
            )
        if failure.cause == Cause.MISMATCH:
            other = self._key.world_ranks[failure.other]
            pair = [(reporter, _describe(failure.reporter_call)), (other, _describe(failure.other_call))]
            return mismatch_error(self._key, failure.epoch, pair)
        word = "closed its workspace before" if failure.cause == Cause.CLOSED else "was interrupted in"
        return ClosedError(f"{self._key}: world rank {reporter} {word} call {failure.epoch}; rebuild the group")


def _release(
    pid: int,
    library: ctypes.CDLL,
    context: int,
    own: OwnSegment | None,
    _keep_mapped: list[Segment],
    fds: list[int],
) -> None:
    if pid != os.getpid():
        return  # a forked child ends; its parent is still in the group
    library.wbk_leave(context, Cause.CLOSED, 0)
    library.wbk_close(context)
    if own is not None:
        own.close()
    for fd in fds:
        os.close(fd)


def _describe(words: CallWords) -> str:
    return call_text(
        _OP_NAMES.get(words.op, f"op {words.op}"),
        tokens=words.tokens,
        hidden=words.hidden,
        dtype=_DTYPE_NAMES.get(words.dtype, f"dtype {words.dtype}"),
        eps=words.eps,
        weight_bias=words.weight_bias,
    )


def _arena_bytes(request: Request) -> int:
    return ARENA_BUFFERS * max(request.max_tokens, 1) * request.hidden * request.dtype.itemsize + 64 * ARENA_BUFFERS


def _layout(library: Path, request: Request) -> Layout:
    layout = Layout()
    code = DTYPE_CODES[request.dtype]
    if not load_library(library).wbk_layout_of(request.hidden, code, _arena_bytes(request), layout):
        raise ResourceError(f"no shared memory layout for {request}")
    return layout


def _patience(num_ranks: int) -> tuple[int, int]:
    """Polls and yields before sleeping: long where every rank can have a core, next to none where they must share."""
    return (100, 500) if len(os.sched_getaffinity(0)) >= num_ranks else (50, 4)


def _host() -> list[str]:
    """What must be equal for two processes to share memory and to see each other: machine, process table, /dev/shm."""
    return [
        host_id(),
        os.readlink("/proc/self/ns/pid"),
        f"{SEGMENT_DIRECTORY} device {os.stat(SEGMENT_DIRECTORY).st_dev}",
    ]


def _require_equal(channel: Channel, told: list[Json]) -> None:
    """Refuse members that cannot share memory, from voted data alone, so alike on every rank."""
    ranks = channel.key.world_ranks
    for name, meaning in (("host", "host, process namespace and /dev/shm"), ("kernels", "kernel object")):
        for world_rank, answer in zip(ranks, told, strict=True):
            if answer[name] != told[0][name]:
                raise ResourceError(
                    f"{channel.key}: world ranks {ranks[0]} and {world_rank} differ in {meaning}: {told[0][name]} and "
                    f"{answer[name]}; shared memory serves ranks of one host only"
                )


def _map_peer(library: Path, name: str, layout: Layout, request: Request) -> Segment:
    segment = map_segment(name, layout.segment_bytes)
    code = DTYPE_CODES[request.dtype]
    if not load_library(library).wbk_check_segment(segment.address, layout, request.hidden, code):
        raise ResourceError(f"segment {name} does not have the expected header")
    return segment


def _watch(pid: int, started: int) -> int:
    """A descriptor that becomes readable when the process ends. Raises ResourceError if it already has."""
    try:
        fd = os.pidfd_open(pid)
    except OSError as e:
        raise ResourceError(f"process {pid} cannot be watched: {e.strerror}") from e
    if not process_lives(pid, started):
        os.close(fd)
        raise ResourceError(f"process {pid} has ended")
    return fd
