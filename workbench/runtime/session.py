"""Session: the face of the runtime. Groups of a GroupMap on real ranks, prepared once, then called by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from workbench.backends.base import Workspace
from workbench.backends.forks import refuse_in_children
from workbench.errors import (
    ArgumentError,
    CaptureError,
    ClosedError,
    UnsupportedPlatformError,
    WorkbenchError,
    name_error,
)
from workbench.fabric import Facts
from workbench.ops import ALL, FusedOutput, Op, Partial, Quant, Rounding, check_quant, quantise
from workbench.plan import Plan
from workbench.ranks import GroupKey, GroupMap
from workbench.runtime.capture import Capture, compare_captures, foreign_capture, meet_ranks, recording, warm_up
from workbench.runtime.data_calls import DataCalls, plain_sum
from workbench.runtime.joining import Joined, join_ranks
from workbench.runtime.opening import find_device, read_settings
from workbench.runtime.probe import probe_facts
from workbench.runtime.requests import make_request, unprepared_error
from workbench.runtime.selection import bind_workspace, freeze_group
from workbench.runtime.subgroup import BoundGroup
from workbench.settings import Settings, check_timeout
from workbench.trace import Recorder, end_passed_calls


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

    world_rank: int
    _groups: Mapping[tuple[int, ...], BoundGroup]
    _calls: DataCalls

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
        self._settings = settings if check is None else replace(settings, check=check)
        self._joined: Joined | None = None
        self._facts: Facts | None = None
        self._captures: list[Capture] = []
        self._meetings = 0
        self._apart = False  # without groups, since a rebuild that failed
        self._again: dict[tuple[str, torch.dtype, int], dict[str, Any]] = {}  # what a rebuild has to prepare yet
        self._freeze_again = False
        self._open = True
        self._closed_by = ""
        self._trace_dir = trace_dir or settings.trace_dir
        self.trace = Recorder.off()
        self._join(wrong_setting or wrong_device)
        if self.trace.enabled:
            self.trace.declare(json.dumps(group_map.to_json()))
        refuse_in_children(self, "session")
        self.trace.instant("session_open", note=f"{group_map.system} {group_map.digest} on {self.device}")

    def rebuild(self) -> None:
        """Make groups, channels and prepared workspaces anew in the same processes, after a failure or an interrupt.

        What was prepared is prepared again, with the same arguments, and frozen if it was. Tensors that earlier calls
        gave stay what they are; those from `empty` are plain memory from now on. What broke it is forgotten. After one
        that failed the session has no groups: call it again, which prepares what that one was to.
        Collective: every rank of the map, none of them inside another call.
        Raises: as opening a session; as prepare. ClosedError if it is closed.
        """
        self._enter("rebuild")
        for bound in self._groups.values():
            self._again |= {(bound.key.kind, *key): made.arguments() for key, made in bound.prepared.items()}
            self._freeze_again |= bound.frozen
        self._calls.broken = True  # so that nobody is waited for
        self._apart = True
        problem: Exception | None = None
        try:
            self._give_back()
        except Exception as e:  # told to all ranks, who come to join again
            problem = e
        self._join(problem)
        for (kind, *_), arguments in self._again.items():
            self.prepare(kind, **arguments)
        if self._freeze_again:
            self.freeze()
        self._again, self._freeze_again = {}, False

    def _join(self, problem: Exception | None) -> None:
        """Meet the other ranks and make the groups of the map. `problem` is what this rank cannot go on with.

        Collective: every rank of the map.
        """
        self._joined = joined = join_ranks(
            self.group_map,
            device=self.device,
            settings=self._settings,
            timeout_s=self.timeout_s,
            trace=self.trace,
            trace_dir=self._trace_dir,
            problem=problem,
            before=self._joined,
            broken=self._is_broken,
        )
        self.trace, self.world_rank, self._groups = joined.trace, joined.world_rank, joined.groups
        self._apart = False
        self._calls = DataCalls(
            self.group_map, joined.groups, world_rank=self.world_rank, device=self.device, check=self._settings.check
        )

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
        concurrent_groups: int = 1,
    ) -> Plan:
        """Choose a path for the group of `kind` and set up its workspace for up to `max_tokens` tokens.

        What each rank's device and links offer is found out at the first call of a process, and told to the group; from
        that, the settings and the tables of plan/ every member decides alike, for each number of tokens. Room for the
        workspaces is voted before any is made. Gives the plan for `max_tokens`; `why` tells those for fewer.
        Preparing the same (dtype, hidden) again with more tokens or another rounding replaces the workspaces; with
        less it changes nothing. `backend` names the only one to try, for comparisons, whatever sizes tables give it.
        concurrent_groups: on CUDA, how many of this rank's groups may have calls under way at one time, on streams of
        their own; each then gets its part of the GPU, since calls that wait for one another must all fit.
        Collective: every member of the group, before capture.
        Raises: ArgumentError for bad sizes; PlanMismatchError if members ask for different things; ResourceError if no
        path is left. Alike on every member.
        """
        self._enter("prepare")
        group = self._calls.bound(kind)
        asked = {"hidden": hidden, "dtype": dtype, "max_tokens": max_tokens, "ops": ops, "rounding": rounding}
        request = make_request(**asked, backend=backend, concurrent_groups=concurrent_groups)
        with self._watched(group, "prepare"):
            plan = bind_workspace(
                group, request, device=self.device, settings=self._settings, backend=backend, probe=self._probe
            )
        self._calls.forget()
        return plan

    def freeze(self) -> None:
        """From now on no workspace is made, grown or replaced; a call with more tokens takes the fallback, and says so.

        Collective: every rank of the map, after its last prepare. Raises CaptureError inside a capture.
        """
        self._enter("freeze")
        for bound in self._groups.values():
            with self._watched(bound, "freeze"):
                freeze_group(bound, device=self.device)
        self._calls.forget()

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
        token = self.trace.begin("capture_door")
        try:
            self._meet("enter", capture, None)
        except BaseException as e:
            self.trace.end(token, error=f"{type(e).__name__}: {e}")
            raise
        self.trace.end(token)
        if self.device == "cuda":
            token = self.trace.begin("capture_warm_up")
            warm_up([bound.channel.data_group for bound in self._groups.values()])
            self.trace.end(token)
        token = self.trace.begin("capture")
        error: BaseException | None = None
        try:
            with recording(capture, self.device):
                self._calls.capturing = capture
                yield capture
        except BaseException as e:
            error = e
        finally:
            self._calls.capturing = None
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

    def all_reduce(self, x: torch.Tensor | Partial, *, group: str | None = None, label: str = "") -> torch.Tensor:
        """The sum of x over the group, as a fresh tensor.

        Shapes: x [tokens, hidden] of a prepared dtype and hidden size; 0 tokens is legal. A Partial needs no `group`.
        label: a name for the call, such as the tensor's; recorded, and compared in check mode and in captures, so that
        two calls that look alike are not taken for each other.
        Numerics: fp32 sum in group_rank order, rounded once; equal bits on every member.
        Collective: every member of the group with equal shapes, in the same order as its other calls on it.
        Capture: in this session's own (`capture`); inside any other it is a CaptureError.
        Raises: CapacityError, ArgumentError, PartialError, CaptureError before any wait; DeadlineError, PeerDeadError,
        and CallFailedError for what nobody foresaw on some rank, which name world ranks.
        """
        return self._calls.call(Op.ALL_REDUCE, x, group, label, None, plain_sum)

    def all_reduce_add_rms_norm(
        self,
        x: torch.Tensor | Partial,
        residual: torch.Tensor,
        weight: torch.Tensor,
        *,
        eps: float,
        group: str | None = None,
        weight_bias: float = 0.0,
        quant: Quant | None = None,
        label: str = "",
    ) -> FusedOutput:
        """Sum x over the group, add the residual, and RMS-normalise each token; quantise the norm if asked.

        residual_out = sum over group of x + residual;   norm_out = residual_out / rms(residual_out) * (bias + weight)
        Shapes: x, residual [tokens, hidden]; weight [hidden]; all of the prepared dtype. Gives fresh tensors. A Partial
        needs no `group`: it is reduced over exactly what it owes. With `quant` the output's `quant` and `scale` are
        filled too (shapes and formula: ops/quant.py), and the trace's path ends in "+quant".
        Numerics: fp32 sum in group_rank order + fp32(residual), one rounding (two if prepared so); the norm reads the
        rounded residual, quantisation the rounded norm. Residual bits are equal on every member that came with an equal
        residual.
        label, Collective, Capture and Raises: as all_reduce.
        Source: own protocol (kernels_ext/README.md); pinned by tests/runtime/test_session.py and test_quant.py there.
        """

        def run(workspace: Workspace, part: torch.Tensor) -> FusedOutput:
            if quant is not None:
                check_quant(quant, workspace.request.hidden)
            out = workspace.all_reduce_add_rms_norm(part, residual, weight, eps=eps, weight_bias=weight_bias)
            return out if quant is None else FusedOutput(out.norm, out.residual, *quantise(out.norm, quant))

        norm = (residual, weight, eps, weight_bias, quant)
        return self._calls.call(Op.ALL_REDUCE_ADD_RMS_NORM, x, group, label, norm, run)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, *, group: str) -> torch.Tensor:
        """An uninitialised tensor that peers read without a copy, from the workspace prepared for its last dimension.

        Local. Raises CapacityError when the workspace's memory is used up; it comes back when the tensor is dropped.
        """
        self._check_open()
        bound = self._calls.bound(group)
        if not isinstance(shape, tuple) or not all(type(size) is int for size in shape):
            raise ArgumentError(f"shape={shape!r}; allowed: a tuple of whole numbers, such as (tokens, hidden)")
        hidden = shape[-1] if shape else 0
        prepared = bound.prepared.get((dtype, hidden))
        if prepared is None:
            raise unprepared_error(bound, dtype, hidden)
        return prepared.empty(shape, dtype)

    def broadcast_object(self, value: Any, *, group: str, group_root: int = 0) -> Any:
        """The object of the group's member number `group_root` (its place in the group's list), on every member.

        The place is translated to the world rank once, here; the object goes over the group's gloo group.
        Collective: every member of the group. Raises LayoutError for a root outside the group, before any wait.
        Source: facts of flashinfer PR 3418 and SGLang PR 21249; pinned by tests/runtime/test_broadcast.py.
        """
        self._enter("broadcast_object")
        bound = self._calls.bound(group)
        if type(group_root) is not int:
            raise ArgumentError(f"group_root={group_root!r}; allowed: a place in the group, a whole number from 0 on")
        bound.key.world_rank(group_root)
        with self._watched(bound, "broadcast_object", group_root):
            return bound.channel.broadcast_object(value, group_root=group_root)

    def barrier(self, *, group: str) -> None:
        """Return once every member of the group has come. Collective; over gloo; raises as broadcast_object."""
        self._enter("barrier")
        bound = self._calls.bound(group)
        with self._watched(bound, "barrier"):
            bound.channel.barrier()

    def gather_object(self, value: Any, *, group: str) -> list[Any]:
        """Every member's JSON-able value, in group_rank order. Collective; over gloo; raises as broadcast_object."""
        self._enter("gather_object")
        bound = self._calls.bound(group)
        with self._watched(bound, "gather_object"):
            return bound.channel.gather(value, what="gather_object")

    def torch_group(self, kind: str) -> dist.ProcessGroup | None:
        """The torch group of `kind` (gloo on CPU, NCCL on CUDA) for plain torch.distributed calls; None if one rank."""
        self._check_joined("torch_group")
        return self._calls.bound(kind).channel.data_group

    def why(self, kind: str, *, tokens: int | None = None) -> Plan:
        """The plan that this rank's group of `kind` was last prepared with, as it reads for `tokens`. Local.

        Raises ArgumentError if nothing was prepared for the group.
        """
        self._check_open()
        if tokens is not None and (type(tokens) is not int or tokens < 0):
            raise ArgumentError(f"tokens={tokens!r}; allowed: a whole number from 0 on, or None")
        bound = self._calls.bound(kind)
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
        if foreign_capture(self.device):
            raise CaptureError("close inside a capture; leave the `with s.capture()` block first, on every rank")
        self._open = False
        self.trace.instant("session_close", note="after a failure" if self._calls.broken else "")
        with ExitStack() as closing:
            closing.callback(self.trace.close)
            closing.callback(end_passed_calls)
            closing.callback(self._give_back)
            if not self._calls.broken:
                for group in self._groups.values():
                    with self._failing_alike(group, "close"):
                        group.close_together()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._open:
            self._calls.broken = True
            for group in self._groups.values():
                group.channel.leave(error)
        self.close()

    def refuse(self, reason: str) -> None:
        """Be closed from now on, for this reason, and leave everything as it is. Local; for children of a fork."""
        self._open = False
        self._closed_by = reason

    def __repr__(self) -> str:
        state = "open" if self._open else "closed"
        return f"Session({self.group_map.system}, world rank {self.world_rank}, {self.device}, {state})"

    def _is_broken(self) -> bool:
        """Whether a call may still wait in the groups there are; none does before a session has opened."""
        return self._joined is not None and self._calls.broken

    def _check_open(self) -> None:
        if not self._open:
            raise ClosedError(self._closed_by or "this session is closed; open a new one on every rank")

    def _check_joined(self, op: str) -> None:
        self._check_open()
        if self._apart:
            raise ClosedError(f"{op}: the last rebuild failed, so this session has no groups; rebuild() on every rank")

    def _enter(self, op: str) -> None:
        """Before anything collective but the data calls: the session is open, and nothing is being captured here.

        It comes before any CUDA call that allocates or waits. Own captures, those of other sessions of the process and
        those of the current stream count.
        """
        self._check_open() if op == "rebuild" else self._check_joined(op)
        foreign = foreign_capture(self.device)
        if foreign:
            where = "a capture" if self._calls.capturing is not None else foreign
            raise CaptureError(
                f"{op} on world rank {self.world_rank} while {where} is on; it waits for other ranks or moves "
                f"memory, so do it before the capture, on every rank"
            )

    def _meet(self, when: str, capture: Capture, error: BaseException | None) -> list[dict[str, Any]]:
        """What every rank has captured so far, or that it failed. Collective over all ranks; a failure breaks it."""
        joined = self._joined
        assert joined is not None
        try:
            return meet_ranks(
                joined.store,
                f"capture{self._meetings}/{when}",
                capture,
                error,
                members=joined.members,
                world_rank=self.world_rank,
                timeout_s=self.timeout_s,
                what=f"{when} a capture",
            )
        except WorkbenchError:
            self._calls.broken = True
            raise

    def _give_back(self) -> None:
        """Captures, workspaces, torch groups: all of it, even where a step raises, and then raise what it raised."""
        assert self._joined is not None
        with ExitStack() as closing:
            closing.callback(self._joined.closing.close)
            for group in self._groups.values():
                closing.callback(group.close)
            while self._captures:
                closing.callback(self._captures.pop().close)

    def _probe(self) -> Facts:
        """This rank's facts, found out once. Local; takes seconds on a GPU."""
        if self._facts is None:
            self._facts = probe_facts(self.world_rank, device=self.device, settings=self._settings)
            self.trace.instant("facts", note=str(self._facts))
        return self._facts

    @contextmanager
    def _watched(self, bound: BoundGroup, op: str, group_root: int | None = None) -> Iterator[None]:
        """Record one host-side collective; a failure that breaks the group's channel breaks the session."""
        token = bound.lane.begin(op, path="gloo", root_group_rank=group_root)
        try:
            with self._failing_alike(bound, op):
                yield
        except BaseException as e:
            bound.lane.end(token, error=name_error(e))
            raise
        bound.lane.end(token)

    @contextmanager
    def _failing_alike(self, bound: BoundGroup, op: str) -> Iterator[None]:
        """Raise what every member is to raise for an error of the block, and tell those that wait."""
        try:
            yield
        except BaseException as e:
            told = self._calls.judge(bound, op, e)
            if self._calls.broken:
                bound.channel.leave(told)
            if told is e:
                raise
            raise told from e
