"""Capture: a step's collectives recorded once and replayed, with the rules that keep ranks together.

On CUDA it is a CUDA graph; on CPU the list of calls, under the same rules. Ranks compare what they captured before any
of them may go on, so that one rank's exception or one rank's missing call is every rank's error within seconds, where
upstream an exchange at the end of the capture hangs (facts: SGLang 11275; vLLM 28334).
"""

from __future__ import annotations

import hashlib
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from workbench.errors import CaptureError, ClosedError
from workbench.ops import FusedOutput, Limits, Op, Quant, check_all_reduce, check_fused, quantise
from workbench.ranks import GroupKey
from workbench.runtime.members import Member, gather_over_store, raise_if_dead, tell_over_store
from workbench.trace import Recorder

NormArguments = tuple[torch.Tensor, torch.Tensor, float, float, Quant | None]
"""residual, weight, eps, weight_bias and quant of a fused call."""

_Result = TypeVar("_Result", torch.Tensor, FusedOutput)
_SHOWN = 64  # calls of a group told to the other ranks in full; of more, the digest still tells that they differ
_open: list[Capture] = []  # of every session of this process
os.register_at_fork(after_in_child=_open.clear)  # a child's own sessions are in no capture


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """One collective of a capture. `norm` is what a fused call has besides x."""

    key: GroupKey
    op: Op
    x: torch.Tensor
    norm: NormArguments | None
    label: str
    path: str

    @property
    def group(self) -> str:
        return str(self.key)

    def check(self, limits: Limits) -> None:
        """Raise what the call itself would raise for its arguments."""
        if self.norm is None:
            check_all_reduce(limits, self.x)
        else:
            residual, weight, eps, weight_bias, _ = self.norm
            check_fused(limits, self.x, residual, weight, eps, weight_bias)

    def fingerprint(self) -> str:
        """What must be equal on every member of the group."""
        shape = "x".join(map(str, self.x.shape))
        numbers = "" if self.norm is None else f" eps {self.norm[2]!r} weight_bias {self.norm[3]!r}"
        quant = "" if self.norm is None or self.norm[4] is None else f" {self.norm[4]}"
        label = f" label {self.label!r}" if self.label else ""
        dtype = str(self.x.dtype).removeprefix("torch.")
        return f"{self.op.value} {shape} {dtype}{numbers}{quant} on {self.path}{label}"


def foreign_capture(device: str) -> str:
    """What captures in this thread or process besides the asking session, in words; "" if nothing does. Local."""
    if _open:
        return "another session's capture"
    if device == "cuda" and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph capture"
    return ""


@contextmanager
def recording(capture: Capture, device: str) -> Iterator[None]:
    """The block whose calls go into `capture`: on CUDA into a graph of its own as well. Local."""
    _open.append(capture)
    try:
        with ExitStack() as graph:
            if device == "cuda":
                capture.graph = torch.cuda.CUDAGraph()
                quiet = graph.enter_context(ExitStack())  # ends after the graph has
                # thread_local: NCCL's watchdog asks after its events meanwhile, which "global" would call an error
                graph.enter_context(torch.cuda.graph(capture.graph, capture_error_mode="thread_local"))
                graph.callback(_expect_empty, quiet)
            yield
    finally:
        _open.remove(capture)


def _expect_empty(quiet: ExitStack) -> None:
    """Keep torch from warning of a graph without calls: where one was refused, the refusal says what to do."""
    quiet.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", message="The CUDA Graph is empty")


class Capture:
    """What `Session.capture()` gives. Replay it after the block has ended; its tensors stay alive with it."""

    def __init__(self, trace: Recorder, enter: Callable[[str], None]) -> None:
        self._trace = trace
        self._enter = enter
        self.calls: list[CapturedCall] = []
        self._again: list[Callable[[], None]] = []
        self.graph: torch.cuda.CUDAGraph | None = None
        self.kept: list[object] = []
        self._state = "open"
        self._thread = threading.get_ident()

    def replay(self) -> None:
        """Run what was captured, on what its inputs hold now; results are in the tensors that the capture gave out.

        Collective: every rank of the session, equally often.
        Raises: CaptureError inside the block or after a failed capture; ClosedError once the session is closed.
        """
        if self._state == "closed":
            raise ClosedError("this capture failed, or its session is closed or rebuilt; capture again")
        if self._state != "complete":
            raise CaptureError("replay before the capture was complete on every rank; replay after the `with` block")
        self._enter("replay")
        token = self._trace.begin("replay")
        try:
            if self.graph is not None:
                self.graph.replay()
            else:
                for run in self._again:
                    run()
        except BaseException as e:
            self._trace.end(token, error=f"{type(e).__name__}: {e}")
            raise
        self._trace.end(token, note=f"{len(self.calls)} calls")

    def record(self, call: CapturedCall, limits: Limits, run: Callable[[], _Result]) -> _Result:
        """Write a call down, and give the tensors that each replay fills.

        On CUDA the call runs into the graph; on CPU it runs at each replay, so what it could not take is refused now,
        and so is another thread, which would take what no replay has filled yet for its result.
        """
        call.check(limits)
        if self.graph is not None:
            out = run()
            self.kept += (call, out)
        else:
            if threading.get_ident() != self._thread:
                raise CaptureError(
                    f"{call.group}: {call.op.value} in a thread that is not the one that captures; a session serves "
                    f"one thread at a time"
                )
            empty: Any = _unfilled(call)  # of the type that the call gives
            out = empty
            self._again.append(lambda: _fill(empty, run()))
        self.calls.append(call)
        return out

    def summary(self) -> dict[str, Any]:
        """Count and fingerprint of the calls on each group, for comparing across ranks."""
        by_group: dict[str, list[str]] = {}
        for call in self.calls:
            by_group.setdefault(call.group, []).append(call.fingerprint())
        return {
            group: {
                "count": len(texts),
                "digest": hashlib.sha256("\n".join(texts).encode()).hexdigest(),
                "calls": texts[:_SHOWN],
            }
            for group, texts in by_group.items()
        }

    def order(self) -> list[str]:
        """The group of each call, in order."""
        return [call.group for call in self.calls]

    def complete(self) -> None:
        """Allow replays: every rank captured the same."""
        self._state = "complete"

    def close(self) -> None:
        """Forbid replays and let the storage go."""
        self._state = "closed"
        self.calls.clear()
        self._again.clear()
        self.kept.clear()
        self.graph = None


def meet_ranks(
    store: dist.Store,
    prefix: str,
    capture: Capture,
    error: BaseException | None,
    *,
    members: Mapping[int, Member],
    world_rank: int,
    timeout_s: float,
    what: str,
) -> list[dict[str, Any]]:
    """What every rank has captured so far, or that it failed, in world-rank order: what compare_captures takes.

    Collective over all ranks, over the store. A rank that is interrupted tells the others and waits for none.
    Raises: DeadlineError or PeerDeadError naming world ranks.
    """
    text = None if error is None else f"{type(error).__name__}: {error}"
    value = {"error": text, "groups": capture.summary(), "order": capture.order()}
    if error is not None and not isinstance(error, Exception):
        tell_over_store(store, prefix, world_rank=world_rank, value=value)
        raise error
    return gather_over_store(
        store,
        prefix,
        world_rank=world_rank,
        world_size=len(members),
        value=value,
        timeout_s=timeout_s,
        what=what,
        advice="every rank of the map captures together; or raise timeout_s",
        now_and_then=lambda: raise_if_dead(tuple(members.values()), members[world_rank], what=what),
    )


def warm_up(groups: Iterable[dist.ProcessGroup | None]) -> None:
    """Let NCCL connect every group, in one order: it must not do so while a stream is being captured. Collective."""
    for group in groups:
        if group is not None:
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    torch.cuda.synchronize()


def compare_captures(told: list[dict[str, Any]]) -> CaptureError | None:
    """The error that the ranks' summaries amount to, or None. Pure: equal input, equal text on every rank.

    told[r] = {"error": text or None, "groups": Capture.summary(), "order": Capture.order()}, in world-rank order. First
    cause first: an exception on some rank, different counts, different calls, then an order that would deadlock.
    """
    for r, rank in enumerate(told):
        if rank["error"]:
            return CaptureError(f"the capture failed on world rank {r}: {rank['error']}; no rank may replay")
    for group in sorted({g for rank in told for g in rank["groups"]}):
        members = _members(group)
        seen = {m: told[m]["groups"].get(group, {"count": 0, "digest": "", "calls": []}) for m in members}
        counts = {m: s["count"] for m, s in seen.items()}
        if len(set(counts.values())) > 1:
            story = ", ".join(f"world rank {m}: {c}" for m, c in counts.items())
            return CaptureError(f"{group}: members captured different numbers of calls ({story}); no rank may replay")
        first = members[0]
        for m in members:
            if seen[m]["digest"] != seen[first]["digest"]:
                place = next(
                    (i for i, (a, b) in enumerate(zip(seen[first]["calls"], seen[m]["calls"], strict=False)) if a != b),
                    64,
                )
                pair = [(w, seen[w]["calls"][place] if place < _SHOWN else "a later call") for w in (first, m)]
                story = " but ".join(f"world rank {w} captured {text}" for w, text in pair)
                return CaptureError(f"{group}: call {place + 1}: {story}; no rank may replay")
    return _find_deadlock([rank["order"] for rank in told])


def _find_deadlock(orders: list[list[str]]) -> CaptureError | None:
    """The error for ranks that would wait for each other in a circle: each has the other's next call behind its own."""
    ahead = [0] * len(orders)
    progress = True
    while progress:
        progress = False
        for r, order in enumerate(orders):
            if ahead[r] == len(order):
                continue
            group = order[ahead[r]]
            members = _members(group)
            if all(ahead[m] < len(orders[m]) and orders[m][ahead[m]] == group for m in members):
                for m in members:
                    ahead[m] += 1
                progress = True
    stuck = [r for r, order in enumerate(orders) if ahead[r] < len(order)]
    if not stuck:
        return None
    story = ", ".join(f"world rank {r} is at {orders[r][ahead[r]]}" for r in stuck[:8])
    return CaptureError(f"a replay would deadlock: {story}; capture the groups in one order on every rank")


def _members(group: str) -> list[int]:
    return [int(m) for m in group[group.index("[") + 1 : -1].split(",")]


def _unfilled(call: CapturedCall) -> torch.Tensor | FusedOutput:
    """What a call gives, full of NaN: reading it before a replay shows."""
    out = torch.full_like(call.x, float("nan"))
    if call.norm is None:
        return out
    quant = call.norm[4]
    return FusedOutput(out, out.clone(), *(() if quant is None else quantise(out, quant)))


def _fill(out: torch.Tensor | FusedOutput, found: torch.Tensor | FusedOutput) -> None:
    if isinstance(out, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        out.copy_(found)
        return
    assert isinstance(found, FusedOutput)
    for name in ("norm", "residual", "quant", "scale"):
        place, value = getattr(out, name), getattr(found, name)
        if place is not None:
            place.copy_(value)
