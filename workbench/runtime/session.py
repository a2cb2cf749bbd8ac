"""Session: the face of the runtime. Groups of a GroupMap on real ranks, prepared once, then called by name."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from workbench.backends.base import Request, Workspace
from workbench.errors import (
    ArgumentError,
    CapacityError,
    ClosedError,
    LayoutError,
    PlanMismatchError,
    ResourceError,
    UnsupportedPlatformError,
    WorkbenchError,
)
from workbench.ops import ALL, DTYPES, FusedOutput, Op, Rounding
from workbench.plan import Plan
from workbench.ranks import GroupKey, GroupMap
from workbench.runtime.devices import choose_device
from workbench.runtime.hello import exchange_hello
from workbench.runtime.process_group import TorchGroups, init_default_group, make_groups, next_session_store
from workbench.runtime.selection import bind_workspace
from workbench.runtime.subgroup import BoundGroup, bind_group
from workbench.settings import Settings, check_timeout
from workbench.trace import Recorder

MAX_HIDDEN = 1 << 20
MAX_TOKENS = 1 << 24


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
        settings: Settings | None = None,
    ) -> None:
        if sys.platform != "linux":
            raise UnsupportedPlatformError(f"a Session needs Linux (futexes, /dev/shm, pidfds); this is {sys.platform}")
        settings = Settings.read() if settings is None else settings
        self.group_map = group_map
        self.timeout_s = settings.timeout_s if timeout_s is None else check_timeout(timeout_s)
        self.device, problem = _choose_device(device, settings)
        self._fusion = settings.fusion
        self._groups: dict[tuple[int, ...], BoundGroup] = {}
        self._ready: dict[tuple[str, torch.dtype, int], tuple[BoundGroup, Workspace]] = {}
        self._broken = False
        self._open = True
        self._generation = 0
        self._trace_dir = trace_dir or settings.trace_dir
        self.trace = Recorder.off()
        try:
            self._join(problem)
        except BaseException:
            self.trace.close()
            raise
        if self.trace.enabled:
            self.trace.declare(json.dumps(group_map.to_json()))
        self.trace.instant("session_open", note=f"{group_map.system} {group_map.digest} on {self.device}")

    def rebuild(self) -> None:
        """Make groups, channels and prepared workspaces anew in the same processes, after a failure or an interrupt.

        What was prepared is prepared again, with the same arguments and on the same path. Tensors that earlier calls gave
        stay what they are; those from `empty` are plain memory from now on. Takes no notice of what broke the session.
        Collective: every rank of the map, none of them inside another call.
        Raises: as opening a session; as prepare. ClosedError if it is closed.
        """
        self._check_open()
        again = [
            (bound.key.kind, prepared.workspace.request, prepared.workspace.backend)
            for bound in self._groups.values()
            for prepared in bound.prepared.values()
        ]
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
            store = next_session_store()
            unwritable = None
            if not self.trace.enabled:
                self.trace, unwritable = _open_trace(self._trace_dir, self.world_rank)
            members = exchange_hello(
                store,
                self.group_map,
                world_rank=self.world_rank,
                world_size=dist.get_world_size(),
                device=self.device,
                fusion=self._fusion,
                problem=problem or unwritable,
                timeout_s=self.timeout_s,
            )
            made = make_groups(self.group_map, device=self.device, timeout_s=self.timeout_s)
            undo.callback(self._leave_groups, made)
            for own in _own_groups(self.group_map, self.world_rank):
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
        self._check_open()
        group = self._bound(kind)
        request = _request(hidden=hidden, dtype=dtype, max_tokens=max_tokens, ops=ops, rounding=rounding)
        with self._watched(group, "prepare"):
            plan = bind_workspace(group, request, device=self.device, fusion=self._fusion, backend=backend)
        self._ready = {k: v for k, v in self._ready.items() if v[0] is not group}
        return plan

    def all_reduce(self, x: torch.Tensor, *, group: str) -> torch.Tensor:
        """The sum of x over the group, as a fresh tensor.

        Shapes: x [tokens, hidden] of a prepared dtype and hidden size; 0 tokens is legal.
        Numerics: fp32 sum in group_rank order, rounded once; equal bits on every member.
        Collective: every member of the group with equal shapes, in the same order as its other calls on it.
        Raises: CapacityError, ArgumentError before any wait; DeadlineError, PeerDeadError naming world ranks.
        """
        bound, workspace = self._ready.get((group, x.dtype, x.shape[-1] if x.dim() else 0)) or self._find(group, x)
        token = bound.lane.begin(
            "all_reduce", shape=x.shape, dtype=_DTYPE_NAMES[x.dtype], path=workspace.backend, reduce_op="sum"
        )
        try:
            out = workspace.all_reduce(x)
        except BaseException as e:
            self._note_failure(bound, token, e)
            raise
        bound.lane.end(token)
        return out

    def all_reduce_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        *,
        eps: float,
        group: str,
        weight_bias: float = 0.0,
    ) -> FusedOutput:
        """Sum x over the group, add the residual, and RMS-normalise each token.

        residual_out = sum over group of x + residual;   norm_out = residual_out / rms(residual_out) * (bias + weight)
        Shapes: x, residual [tokens, hidden]; weight [hidden]; all of the prepared dtype. Gives fresh tensors.
        Numerics: fp32 sum in group_rank order + fp32(residual), one rounding (two if prepared so); the norm reads the
        rounded residual. Residual bits are equal on every member that came with an equal residual.
        Collective and Raises: as all_reduce.
        Source: own protocol (kernels_ext/README.md); pinned by tests/runtime/test_session.py.
        """
        bound, workspace = self._ready.get((group, x.dtype, x.shape[-1] if x.dim() else 0)) or self._find(group, x)
        token = bound.lane.begin(
            "all_reduce_add_rms_norm",
            shape=x.shape,
            dtype=_DTYPE_NAMES[x.dtype],
            path=workspace.backend,
            reduce_op="sum",
        )
        try:
            out = workspace.all_reduce_add_rms_norm(x, residual, weight, eps=eps, weight_bias=weight_bias)
        except BaseException as e:
            self._note_failure(bound, token, e)
            raise
        bound.lane.end(token)
        return out

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, *, group: str) -> torch.Tensor:
        """An uninitialised tensor that peers read without a copy, from the workspace prepared for its last dimension.

        Local. Raises CapacityError when the workspace's memory is used up; it comes back when the tensor is dropped.
        """
        self._check_open()
        bound = self._bound(group)
        hidden = shape[-1] if shape else 0
        prepared = bound.prepared.get((dtype, hidden))
        if prepared is None:
            raise _unprepared(bound, dtype, hidden)
        return prepared.workspace.empty(tuple(shape), dtype)

    def broadcast_object(self, value: Any, *, group: str, group_root: int = 0) -> Any:
        """The object of the group's member number `group_root` (its place in the group's list), on every member.

        The place is translated to the world rank once, here; the object goes over the group's gloo group.
        Collective: every member of the group. Raises LayoutError for a root outside the group, before any wait.
        Source: facts of flashinfer PR 3418 and SGLang PR 21249; pinned by tests/runtime/test_broadcast.py.
        """
        self._check_open()
        bound = self._bound(group)
        bound.key.world_rank(group_root)
        with self._watched(bound, "broadcast_object", group_root):
            return bound.channel.broadcast_object(value, group_root=group_root)

    def barrier(self, *, group: str) -> None:
        """Return once every member of the group has come. Collective; over gloo; raises as broadcast_object."""
        self._check_open()
        bound = self._bound(group)
        with self._watched(bound, "barrier"):
            bound.channel.barrier()

    def gather_object(self, value: Any, *, group: str) -> list[Any]:
        """Every member's JSON-able value, in group_rank order. Collective; over gloo; raises as broadcast_object."""
        self._check_open()
        bound = self._bound(group)
        with self._watched(bound, "gather_object"):
            return bound.channel.gather(value)

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

    def close(self) -> None:
        """Give everything back: workspaces, groups, and the default group if this session made it. Twice is fine.

        Collective: waits for the members of its groups, unless a failure already broke the session here.
        """
        if not self._open:
            return
        self._open = False
        self._ready.clear()
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
        self._broken = self._broken or error is not None
        self.close()

    def __repr__(self) -> str:
        state = "open" if self._open else "closed"
        return f"Session({self.group_map.system}, world rank {self.world_rank}, {self.device}, {state})"

    def _check_open(self) -> None:
        if not self._open:
            raise ClosedError("this session is closed; open a new one on every rank")

    def _bound(self, kind: str) -> BoundGroup:
        return self._groups[self.group(kind).world_ranks]

    def _find(self, kind: str, x: torch.Tensor) -> tuple[BoundGroup, Workspace]:
        """The workspace for x in this rank's group of `kind`; remembered, so that a call looks it up once."""
        self._check_open()
        bound = self._bound(kind)
        hidden = x.shape[-1] if x.dim() else 0
        prepared = bound.prepared.get((x.dtype, hidden))
        if prepared is None:
            raise _unprepared(bound, x.dtype, hidden)
        self._ready[kind, x.dtype, hidden] = found = (bound, prepared.workspace)
        return found

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
        if not isinstance(error, (ArgumentError, CapacityError, LayoutError, PlanMismatchError, ResourceError)):
            self._broken = True

    def _leave_groups(self, made: dict[tuple[int, ...], TorchGroups]) -> None:
        for groups in made.values():
            if self._broken:
                groups.abandon()
            else:
                groups.destroy()


_DTYPE_NAMES = defaultdict(lambda: "other", {d: str(d).removeprefix("torch.") for d in DTYPES})


def _choose_device(device: str | None, settings: Settings) -> tuple[str, str | None]:
    """The device, and what is wrong with it. A problem of one rank is told to all before it is raised."""
    try:
        return choose_device(device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), settings), None
    except ArgumentError as e:
        return "cpu", str(e)


def _open_trace(directory: str | None, world_rank: int) -> tuple[Recorder, str | None]:
    """The recorder, and why it could not be opened. A problem of one rank is told to all before it is raised."""
    if directory is None:
        return Recorder.off(), None
    try:
        return Recorder.open(directory, world_rank), None
    except (OSError, WorkbenchError) as e:
        return Recorder.off(), f"no trace can be written to {directory}: {e}"


def _request(*, hidden: Any, dtype: Any, max_tokens: Any, ops: Any, rounding: Any) -> Request | ArgumentError:
    """The request, or the error to be voted: a bad argument on one rank must be every member's error."""
    try:
        for name, value, limit in (("hidden", hidden, MAX_HIDDEN), ("max_tokens", max_tokens, MAX_TOKENS)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
                return ArgumentError(f"{name}={value!r}; allowed: a whole number from 1 to {limit}")
        if dtype not in DTYPES:
            names = ", ".join(str(d) for d in DTYPES)
            return ArgumentError(f"dtype={dtype!r}; allowed: {names}")
        chosen = frozenset(ops)
        if not chosen or not all(isinstance(op, Op) for op in chosen):
            return ArgumentError(f"ops={ops!r}; allowed: members of workbench.ops.Op, at least one")
        return Request(hidden=hidden, dtype=dtype, max_tokens=max_tokens, ops=chosen, rounding=Rounding(rounding))
    except (TypeError, ValueError) as e:
        return ArgumentError(f"ops={ops!r} rounding={rounding!r}: {e}; allowed: sets of Op; 'once' or 'twice'")


def _unprepared(bound: BoundGroup, dtype: torch.dtype, hidden: int) -> ArgumentError:
    have = ", ".join(f"{str(d).removeprefix('torch.')} hidden {h}" for d, h in bound.prepared) or "nothing"
    return ArgumentError(
        f"{bound.key}: {str(dtype).removeprefix('torch.')} hidden {hidden} is not prepared (prepared: {have}); call "
        f"prepare({bound.key.kind!r}, hidden={hidden}, dtype={dtype}, max_tokens=...) on every member first"
    )


@dataclass(frozen=True, slots=True)
class _Own:
    """One distinct group that holds this rank: its key, all its kinds as text, its place in the order of creation."""

    key: GroupKey
    kinds: str
    ordinal: int


def _own_groups(group_map: GroupMap, world_rank: int) -> list[_Own]:
    """The distinct groups that hold `world_rank`, in creation order. Kinds with equal lists are one group here, which
    goes by the first of them that is not the world and is labelled with all ("attn_cp=moe_ep").
    """
    kinds: dict[tuple[int, ...], list[str]] = {}
    for kind, lists in group_map.groups.items():
        for ranks in lists:
            kinds.setdefault(ranks, []).append(kind)
    return [
        _Own(GroupKey(next((n for n in names if n != "world"), "world"), ranks), "=".join(names), ordinal)
        for ordinal, (ranks, names) in enumerate(kinds.items())
        if world_rank in ranks
    ]
