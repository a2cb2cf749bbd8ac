"""Session: the face of the runtime. Groups of a GroupMap on real ranks, prepared once, then called by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from workbench.backends.base import Workspace
from workbench.errors import (
    ArgumentError,
    CaptureError,
    ClosedError,
    PartialError,
    UnsupportedPlatformError,
    WorkbenchError,
)
from workbench.ops import ALL, FusedOutput, Limits, Op, Partial, ReduceOver, Rounding
from workbench.plan import Plan
from workbench.ranks import GroupKey, GroupMap, product_group
from workbench.runtime.capture import Capture, CapturingWorkspace, compare_captures, meet_ranks, warm_up
from workbench.runtime.checked import CheckedWorkspace
from workbench.runtime.hello import exchange_hello
from workbench.runtime.members import Member
from workbench.runtime.opening import DTYPE_NAMES, HARMLESS, find_device, open_trace, read_settings
from workbench.runtime.process_group import TorchGroups, init_default_group, make_groups, next_session_store
from workbench.runtime.requests import MAX_TOKENS, make_request, unprepared_error
from workbench.runtime.selection import bind_workspace, freeze_group
from workbench.runtime.subgroup import BoundGroup, bind_group, own_groups
from workbench.settings import Settings, check_timeout
from workbench.trace import Recorder

_Result = TypeVar("_Result", torch.Tensor, FusedOutput)


class Session:
    """The groups of `group_map` on this process, ready for fused collectives.

    with Session(GroupMap.build("sglang", tp=4), device="cpu") as s:
        s.prepare("tp", hidden=7168, dtype=torch.bfloat16, max_tokens=512)
        out = s.all_reduce_add_rms_norm(x, residual, weight, eps=1e-6, group="tp")

    Uses the default process group if one is initialised; else makes it from torchrun's environment and destroys it on
    close. One thread at a time.
    device: "cpu" or "cuda"; default: WORKBENCH_DEVICE, else cuda if every local rank has a GPU.
    timeout_s: how long any wait on another rank may take; default: WORKBENCH_TIMEOUT_S, else 60.
    trace_dir: directory for one trace file a rank; default: WORKBENCH_TRACE_DIR, else no trace.
    check: compare every call's arguments across its group before it runs (MismatchError on every member); slow.
        Default: WORKBENCH_CHECK, else off.
    Collective: every rank of the map opens and closes its session, in the same order as its other sessions.
    Raises: LayoutError if the map does not fit the world; PlanMismatchError if ranks came with different maps or
    settings; DeadlineError naming ranks that did not come. All before the first group is made, alike on every rank.
    """

    def __init__(
        self,
        group_map: GroupMap,
        *,
        device: str | None = None,
        timeout_s: float | None = None,
        trace_dir: str | None = None,
        check: bool | None = None,
        settings: Settings | None = None,
    ) -> None:
        if sys.platform != "linux":
            raise UnsupportedPlatformError(f"a Session needs Linux (futexes, /dev/shm, pidfds); this is {sys.platform}")
        if not isinstance(group_map, GroupMap):
            raise ArgumentError(
                f"group_map is a {type(group_map).__name__}; allowed: a GroupMap, from GroupMap.build(...)"
            )
        settings, wrong_setting = (settings, None) if settings is not None else read_settings()
        self.group_map = group_map
        self.timeout_s = settings.timeout_s if timeout_s is None else check_timeout(timeout_s)
        self.device, wrong_device = find_device(device, settings)
        self._settings = settings
        self._check = settings.check if check is None else check
        self._groups: dict[tuple[int, ...], BoundGroup] = {}
        self._members: dict[int, Member] = {}
        self._ready: dict[tuple[str, torch.dtype, int], tuple[BoundGroup, Workspace]] = {}
        self._owed: dict[ReduceOver, str] = {}
        self._captures: list[Capture] = []
        self._capturing: Capture | None = None
        self._meetings = 0
        self._broken = False
        self._open = True
        self._generation = 0
        self._trace_dir = trace_dir or settings.trace_dir
        self.trace = Recorder.off()
        try:
            self._join(wrong_setting or wrong_device)
        except BaseException:
            self.trace.close()
            raise
        if self.trace.enabled:
            self.trace.declare(json.dumps(group_map.to_json()))
        self.trace.instant("session_open", note=f"{group_map.system} {group_map.digest} on {self.device}")

    def rebuild(self) -> None:
        """Make groups, channels and prepared workspaces anew in the same processes, after a failure or an interrupt.

        What was prepared is prepared again, with the same arguments and on the same path. Tensors that earlier calls
        gave stay what they are; those from `empty` are plain memory from now on. What broke it is forgotten.
        Collective: every rank of the map, none of them inside another call.
        Raises: as opening a session; as prepare. ClosedError if it is closed.
        """
        self._enter("rebuild")
        again = [
            (bound.key.kind, prepared.workspace.request, prepared.workspace.backend)
            for bound in self._groups.values()
            for prepared in bound.prepared.values()
        ]
        self._drop_captures()
        self._broken = True  # so that nobody is waited for
        for group in reversed(self._groups.values()):
            group.close()
        self._closing.close()
        self._groups.clear()
        self._ready.clear()
        self._generation += 1
        self._join(None)
        self._broken = False
        for kind, request, backend in again:
            self.prepare(
                kind,
                hidden=request.hidden,
                dtype=request.dtype,
                max_tokens=request.max_tokens,
                ops=request.ops,
                rounding=request.rounding,
                backend=backend,
            )

    def _join(self, problem: str | None) -> None:
        """Make the default group if there is none, compare what the ranks came with, and make the groups of the map.

        `problem` is what this rank cannot go on with: every rank hears it. Collective: every rank of the map.
        """
        with ExitStack() as undo:
            if init_default_group(self.device, self.timeout_s):
                undo.callback(dist.destroy_process_group)
            self.world_rank = dist.get_rank()
            self._store = store = next_session_store()
            unwritable = None
            if not self.trace.enabled:
                self.trace, unwritable = open_trace(self._trace_dir, self.world_rank)
            self._members = members = exchange_hello(
                store,
                self.group_map,
                world_rank=self.world_rank,
                world_size=dist.get_world_size(),
                device=self.device,
                settings=replace(self._settings, check=self._check),
                problem=problem or unwritable,
                timeout_s=self.timeout_s,
            )
            made = make_groups(self.group_map, device=self.device, timeout_s=self.timeout_s)
            undo.callback(self._leave_groups, made)
            for own in own_groups(self.group_map, self.world_rank):
                self._groups[own.key.world_ranks] = bind_group(
                    own.key,
                    made.get(own.key.world_ranks),
                    members,
                    world_rank=self.world_rank,
                    device=self.device,
                    store=store,
                    timeout_s=self.timeout_s,
                    lane=self.trace.group(own.key, label=own.kinds, ordinal=own.ordinal, generation=self._generation),
                )
            self._closing = undo.pop_all()

    def group(self, kind: str) -> GroupKey:
        """The group of `kind` (or alias) that holds this rank. Local. Raises LayoutError if the kind has none."""
        return self.group_map.group_of(kind, self.world_rank)

    def prepare(
        self,
        kind: str,
        *,
        hidden: int,
        dtype: torch.dtype,
        max_tokens: int,
        ops: Collection[Op] = ALL,
        rounding: Rounding | str = Rounding.ONCE,
        backend: str | None = None,
    ) -> Plan:
        """Choose a path for the group of `kind` and set up its workspace for up to `max_tokens` tokens.

        Preparing the same (dtype, hidden) again with more tokens or another rounding replaces the workspace; with
        less it changes nothing. `backend` names the only path to try, for comparisons.
        Collective: every member of the group, before capture.
        Raises: ArgumentError for bad sizes; PlanMismatchError if members ask for different things; ResourceError if no
        path is left. Alike on every member.
        """
        self._enter("prepare")
        group = self._bound(kind)
        request = make_request(hidden=hidden, dtype=dtype, max_tokens=max_tokens, ops=ops, rounding=rounding)
        with self._watched(group, "prepare"):
            plan = bind_workspace(group, request, device=self.device, settings=self._settings, backend=backend)
        self._ready = {k: v for k, v in self._ready.items() if v[0] is not group}
        return plan

    def freeze(self) -> None:
        """From now on no workspace is made, grown or replaced; a call with more tokens takes the fallback, and says so.

        Collective: every rank of the map, after its last prepare. Raises CaptureError inside a capture.
        """
        self._enter("freeze")
        for bound in self._groups.values():
            with self._watched(bound, "freeze"):
                freeze_group(bound, device=self.device)
        self._ready.clear()

    @contextmanager
    def capture(self) -> Iterator[Capture]:
        """Record this block's collectives, to be replayed: a CUDA graph, or on CPU the list of calls.

        with s.capture() as c:
            out = s.all_reduce_add_rms_norm(x, residual, weight, eps=1e-6, group="tp")
        c.replay()                                          # fills out, from what x holds now

        Nothing else collective may happen inside: prepare, freeze, rebuild, close, object exchanges and barriers raise
        CaptureError that names the operation, before any wait.
        Collective: every rank of the map enters and leaves together. All groups are entered, in one order.
        Raises: CaptureError, alike on every rank, if a rank raised inside (its own error is the cause there) or if
        members of a group captured different calls. DeadlineError naming ranks that did not come.
        """
        self._enter("capture")
        capture = Capture(self.trace, self._enter)
        self._meetings += 1
        self._meet("enter", capture, None)
        if self.device == "cuda":
            token = self.trace.begin("capture_warm_up")
            warm_up([bound.channel.data_group for bound in self._groups.values()])
            self.trace.end(token)
        token = self.trace.begin("capture")
        self._ready.clear()
        self._capturing = capture
        error: BaseException | None = None
        try:
            with ExitStack() as recording:
                if self.device == "cuda":
                    capture.graph = torch.cuda.CUDAGraph()
                    # thread_local: NCCL's watchdog asks after its events meanwhile, which "global" would call an error
                    recording.enter_context(torch.cuda.graph(capture.graph, capture_error_mode="thread_local"))
                yield capture
        except BaseException as e:
            error = e
        self._capturing = None
        self._ready.clear()
        try:
            failed = compare_captures(self._meet("leave", capture, error))
        except BaseException as e:
            self.trace.end(token, error=f"{type(e).__name__}: {e}")
            raise
        self.trace.end(token, note=f"{len(capture.calls)} calls", error=str(failed or ""))
        if failed is not None:
            capture.close()
            raise failed from error
        capture.complete()
        self._captures.append(capture)
        for bound in self._groups.values():
            bound.captured = True

    def all_reduce(self, x: torch.Tensor | Partial, *, group: str | None = None) -> torch.Tensor:
        """The sum of x over the group, as a fresh tensor.

        Shapes: x [tokens, hidden] of a prepared dtype and hidden size; 0 tokens is legal. A Partial needs no `group`.
        Numerics: fp32 sum in group_rank order, rounded once; equal bits on every member.
        Collective: every member of the group with equal shapes, in the same order as its other calls on it.
        Raises: CapacityError, ArgumentError, PartialError before any wait; DeadlineError and PeerDeadError, which name
        world ranks.
        """
        return self._call("all_reduce", x, group, lambda workspace, part: workspace.all_reduce(part))

    def all_reduce_add_rms_norm(
        self,
        x: torch.Tensor | Partial,
        residual: torch.Tensor,
        weight: torch.Tensor,
        *,
        eps: float,
        group: str | None = None,
        weight_bias: float = 0.0,
    ) -> FusedOutput:
        """Sum x over the group, add the residual, and RMS-normalise each token.

        residual_out = sum over group of x + residual;   norm_out = residual_out / rms(residual_out) * (bias + weight)
        Shapes: x, residual [tokens, hidden]; weight [hidden]; all of the prepared dtype. Gives fresh tensors. A Partial
        needs no `group`: it is reduced over exactly what it owes.
        Numerics: fp32 sum in group_rank order + fp32(residual), one rounding (two if prepared so); the norm reads the
        rounded residual. Residual bits are equal on every member that came with an equal residual.
        Collective and Raises: as all_reduce.
        Source: own protocol (kernels_ext/README.md); pinned by tests/runtime/test_session.py.
        """
        return self._call(
            "all_reduce_add_rms_norm",
            x,
            group,
            lambda workspace, part: workspace.all_reduce_add_rms_norm(
                part, residual, weight, eps=eps, weight_bias=weight_bias
            ),
        )

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, *, group: str) -> torch.Tensor:
        """An uninitialised tensor that peers read without a copy, from the workspace prepared for its last dimension.

        Local. Raises CapacityError when the workspace's memory is used up; it comes back when the tensor is dropped.
        """
        self._check_open()
        bound = self._bound(group)
        hidden = shape[-1] if shape else 0
        prepared = bound.prepared.get((dtype, hidden))
        if prepared is None:
            raise unprepared_error(bound, dtype, hidden)
        return prepared.workspace.empty(tuple(shape), dtype)

    def broadcast_object(self, value: Any, *, group: str, group_root: int = 0) -> Any:
        """The object of the group's member number `group_root` (its place in the group's list), on every member.

        The place is translated to the world rank once, here; the object goes over the group's gloo group.
        Collective: every member of the group. Raises LayoutError for a root outside the group, before any wait.
        Source: facts of flashinfer PR 3418 and SGLang PR 21249; pinned by tests/runtime/test_broadcast.py.
        """
        self._enter("broadcast_object")
        bound = self._bound(group)
        bound.key.world_rank(group_root)
        with self._watched(bound, "broadcast_object", group_root):
            return bound.channel.broadcast_object(value, group_root=group_root)

    def barrier(self, *, group: str) -> None:
        """Return once every member of the group has come. Collective; over gloo; raises as broadcast_object."""
        self._enter("barrier")
        bound = self._bound(group)
        with self._watched(bound, "barrier"):
            bound.channel.barrier()

    def gather_object(self, value: Any, *, group: str) -> list[Any]:
        """Every member's JSON-able value, in group_rank order. Collective; over gloo; raises as broadcast_object."""
        self._enter("gather_object")
        bound = self._bound(group)
        with self._watched(bound, "gather_object"):
            return bound.channel.gather(value, what="gather_object")

    def torch_group(self, kind: str) -> dist.ProcessGroup | None:
        """The torch group of `kind` (gloo on CPU, NCCL on CUDA) for plain torch.distributed calls; None if one rank."""
        self._check_open()
        return self._bound(kind).channel.data_group

    def why(self, kind: str, *, tokens: int | None = None) -> Plan:
        """The plan that this rank's group of `kind` was last prepared with, as it reads for `tokens`. Local.

        Raises ArgumentError if nothing was prepared for the group.
        """
        self._check_open()
        bound = self._bound(kind)
        plan = bound.plan(tokens=tokens)
        if plan is None:
            raise ArgumentError(f"{bound.key}: nothing is prepared; call prepare({kind!r}, ...) on every member first")
        return plan

    def check(self) -> None:
        """Raise what a kernel reported since the last call, such as a peer that never came. Local; does not wait."""
        self._check_open()
        for bound in self._groups.values():
            bound.check()

    def close(self) -> None:
        """Give everything back: workspaces, groups, and the default group if this session made it. Twice is fine.

        Collective: waits for the members of its groups, unless a failure already broke the session here.
        """
        if not self._open:
            return
        if self._capturing is not None:
            raise CaptureError("close inside a capture; leave the `with s.capture()` block first, on every rank")
        self._open = False
        self._ready.clear()
        self._drop_captures()
        self.trace.instant("session_close", note="after a failure" if self._broken else "")
        try:
            for group in self._groups.values():
                if not self._broken:
                    group.channel.barrier(what="close")
        finally:
            for group in reversed(self._groups.values()):
                group.close()
            self._closing.close()
            self.trace.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._broken = True
            if self._open:
                for group in self._groups.values():
                    group.channel.leave(error)
        self.close()

    def __repr__(self) -> str:
        state = "open" if self._open else "closed"
        return f"Session({self.group_map.system}, world rank {self.world_rank}, {self.device}, {state})"

    def _check_open(self) -> None:
        if not self._open:
            raise ClosedError("this session is closed; open a new one on every rank")

    def _enter(self, op: str) -> None:
        """Before anything collective but the fused calls: the session is open and nothing is being captured."""
        self._check_open()
        streaming = self.device == "cuda" and torch.cuda.is_current_stream_capturing()
        if self._capturing is not None or streaming:
            raise CaptureError(
                f"{op} on world rank {self.world_rank} while a capture is on; it waits for other ranks or moves "
                f"memory, so do it before the capture, on every rank"
            )

    def _call(
        self, op: str, x: torch.Tensor | Partial, group: str | None, run: Callable[[Workspace, torch.Tensor], _Result]
    ) -> _Result:
        """Run one data call on the workspace that x belongs to, recorded; a Partial is settled by it."""
        part, kind = self._whose(x, group)
        bound, workspace = self._ready.get((kind, part.dtype, part.shape[-1] if part.dim() else 0)) or self._find(
            kind, part
        )
        token = bound.lane.begin(
            op,
            shape=part.shape,
            dtype=DTYPE_NAMES[part.dtype],
            path=workspace.backend,
            reduce_op="sum",
            capture=self._capturing is not None,
        )
        try:
            out = run(workspace, part)
        except BaseException as e:
            self._note_failure(bound, token, e)
            raise
        bound.lane.end(token)
        if isinstance(x, Partial):
            x.settle()
        return out

    def _whose(self, x: torch.Tensor | Partial, group: str | None) -> tuple[torch.Tensor, str]:
        """The tensor to reduce and the kind to reduce it over."""
        if not isinstance(x, Partial):
            if not isinstance(x, torch.Tensor):
                raise ArgumentError(f"x is a {type(x).__name__}; allowed: a tensor [tokens, hidden], or a Partial")
            if group is None:
                raise ArgumentError("a plain tensor needs group=KIND; only a Partial says itself over what it is owed")
            return x, group
        kind = self._owed.get(x.owed)
        if kind is None:
            self._owed[x.owed] = kind = product_group(self.group_map, x.owed.kinds, self.world_rank).kind
        if group is not None and self.group(group).world_ranks != self.group(kind).world_ranks:
            raise PartialError(
                f"{x!r} owes a sum over {self.group(kind)}, but group={group!r} is {self.group(group)}; leave group out"
            )
        return x.unreduced(), kind

    def _meet(self, when: str, capture: Capture, error: BaseException | None) -> list[dict[str, Any]]:
        """What every rank has captured so far, or that it failed. Collective over all ranks; a failure breaks it."""
        try:
            return meet_ranks(
                self._store,
                f"capture{self._meetings}/{when}",
                capture,
                error,
                members=self._members,
                world_rank=self.world_rank,
                timeout_s=self.timeout_s,
                what=f"{when} a capture",
            )
        except WorkbenchError:
            self._broken = True
            raise

    def _drop_captures(self) -> None:
        while self._captures:
            self._captures.pop().close()

    def _bound(self, kind: str) -> BoundGroup:
        return self._groups[self.group(kind).world_ranks]

    def _find(self, kind: str, x: torch.Tensor) -> tuple[BoundGroup, Workspace]:
        """The workspace for x in this rank's group of `kind`; remembered, so that a call looks it up once."""
        self._check_open()
        bound = self._bound(kind)
        hidden = x.shape[-1] if x.dim() else 0
        prepared = bound.prepared.get((x.dtype, hidden))
        if prepared is None:
            raise unprepared_error(bound, x.dtype, hidden)
        workspace = prepared.workspace
        if self._check:
            workspace = CheckedWorkspace(workspace, bound.channel)
        if self._capturing is not None:
            workspace = CapturingWorkspace(prepared.workspace, self._capturing, self._limits(bound, prepared.workspace))
        self._ready[kind, x.dtype, hidden] = found = (bound, workspace)
        return found

    def _limits(self, bound: BoundGroup, workspace: Workspace) -> Limits:
        """What a captured call must fit, checked when it is captured; a frozen workspace takes any number of tokens."""
        request = workspace.request
        return Limits(
            hidden=request.hidden,
            dtype=request.dtype,
            max_tokens=MAX_TOKENS if bound.frozen else request.max_tokens,
            group=str(bound.key),
            world_rank=self.world_rank,
            device=self.device,
        )

    @contextmanager
    def _watched(self, bound: BoundGroup, op: str, group_root: int | None = None) -> Iterator[None]:
        """Record one host-side collective; a failure that breaks the group's channel breaks the session."""
        token = bound.lane.begin(op, path="gloo", root_group_rank=group_root)
        try:
            yield
        except BaseException as e:
            self._note_failure(bound, token, e)
            raise
        bound.lane.end(token)

    def _note_failure(self, bound: BoundGroup, token: Any, error: BaseException) -> None:
        """Errors that are alike on every member before any wait leave the session usable; others end it."""
        bound.lane.end(token, error=f"{type(error).__name__}: {error}")
        if not isinstance(error, HARMLESS):
            self._broken = True

    def _leave_groups(self, made: dict[tuple[int, ...], TorchGroups]) -> None:
        for groups in made.values():
            if self._broken:
                groups.abandon()
            else:
                groups.destroy()
