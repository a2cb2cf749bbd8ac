"""The comparison itself, on every rank: set up all ways, check each, then time them in turns; a row a token count."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from workbench.backends.base import Workspace
from workbench.measure.about import describe_device, describe_run
from workbench.measure.case import EPS, Case, CaseFailedError, Gives, Inputs, Work, again, check_case, together
from workbench.measure.chain import ALONE, Gemms
from workbench.measure.kit import LABELS, PARTS, Kit
from workbench.measure.library import LIBRARY_WAYS, SYMMETRIC, SYMMETRIC_WAYS, LibraryWays, SymmetricWays
from workbench.measure.roofline import simulate_us
from workbench.measure.spec import FusedSpec
from workbench.measure.timing import (
    Round,
    SessionMeeting,
    from_last_arrival,
    host_round,
    skewed_host_round,
    time_rounds,
)
from workbench.plan import all_paths, split_choice
from workbench.ranks import GroupMap
from workbench.runtime import Session
from workbench.runtime.workspaces import find_workspace
from workbench.trace import Column, Comparison, Role, Row, Scenario, Spread

KIND = "tp"
_DELAY = "delay"
_left_open: list[ExitStack] = []


def measure_fused(
    spec: FusedSpec,
    *,
    say: Callable[[str], None] = lambda _: None,
    save: Callable[[Comparison], None] = lambda _: None,
    leave_open: bool = False,
) -> Comparison:
    """Every way to all_reduce + add + RMSNorm that runs here, right first, then timed side by side.

    Our own way is the one a Session takes. What gives a wrong result is named in its row and not timed; what cannot
    run here is named with the reason.   save: called on every rank with what is known, after each number of tokens.
    leave_open: close nothing, for a process that ends next: other systems' kernels keep its memory mapped.
    Collective: every rank of the default group, or of torchrun's job if there is no group yet; equal on each.
    Raises: WorkbenchError, alike on every rank, if our own way cannot be set up; DeadlineError naming ranks.
    """
    with ExitStack() as stack:
        bench = _Bench(spec, stack, say)
        comparison = Comparison(
            ranks=spec.ranks,
            hidden=spec.hidden,
            dtype=spec.dtype,
            device=describe_device(spec.device),
            about=describe_run(spec),
        )
        for tokens in spec.tokens:
            rows = sorted((*comparison.rows, *bench.rows(tokens)), key=_place)
            comparison = replace(comparison, rows=tuple(rows), finished=tokens == spec.tokens[-1])
            save(comparison)
        if leave_open:
            _left_open.append(stack.pop_all())
    return comparison


def _place(row: Row) -> tuple[int, int]:
    return list(Scenario).index(row.scenario), row.tokens


@dataclass(frozen=True, slots=True)
class _Path:
    """A session that was prepared with one backend; ours by its own choice, named after that for the fewest tokens."""

    name: str
    session: Session


def _backends(device: str) -> dict[str, str]:
    """The backends that plans choose without multicast, and the rounding each is prepared with: once, if it can."""
    found: dict[str, set[str]] = {}
    for path in all_paths().values():
        if path.device == device and not path.multicast and not path.by_name_only:
            found.setdefault(path.backend, set()).update(path.roundings)
    return {name: "once" if "once" in roundings else "twice" for name, roundings in found.items()}


def known_ways() -> tuple[str, ...]:
    """What FusedSpec.without may name, on any device: ways, and what they come from."""
    backends = tuple(dict.fromkeys(name for device in ("cpu", "cuda") for name in _backends(device)))
    ours = [f"{name} {part}" for name in backends for part in ("sum", "copied")]
    return (*backends, *LIBRARY_WAYS, SYMMETRIC, *SYMMETRIC_WAYS, *PARTS, *LABELS, *ours)


class _Bench:
    """All ways, set up for the largest number of tokens."""

    def __init__(self, spec: FusedSpec, stack: ExitStack, say: Callable[[str], None]) -> None:
        self._spec, self._stack, self._say = spec, stack, say
        self._left_out: dict[str, str] = {}
        self._beside = ["torch's all-reduce + norm"]
        self._paths = [self._open(None)]
        ours = self._paths[0]
        plan = ours.session.why(KIND)
        self._rejected = dict(plan.rejected)
        self._meeting = SessionMeeting(ours.session, KIND)
        self._work = Work(
            rank=ours.session.world_rank,
            ranks=spec.ranks,
            hidden=spec.hidden,
            dtype=getattr(torch, spec.dtype),
            device=spec.device,
        )
        for name in _backends(spec.device):
            if name != ours.name:
                self._try(name, partial(self._add_path, name))
        group = ours.session.torch_group(KIND)
        assert group is not None
        self._others: list[LibraryWays | SymmetricWays | Kit] = [LibraryWays(self._work, group)]
        if spec.device == "cuda":
            self._try(SYMMETRIC, self._add_symmetric)
        if spec.peers:
            gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=spec.timeout_s))
            for part in PARTS:
                self._try(part, partial(self._add_kit, part, gloo))
        if spec.device == "cuda":
            gc.collect()
            gc.freeze()  # every capture collects garbage, and what is set up by now is none
        say(f"our way is {plan.choice}; timed beside it: {', '.join(self._beside)}")
        for name, reason in plan.rejected:
            if name not in self._left_out:
                say(f"not {name}: {reason}")

    def rows(self, tokens: int) -> Iterator[Row]:
        """A row for each scenario. Collective."""
        inputs = self._work.random(tokens)
        wrong: dict[str, str] = {}
        left_out = dict(self._left_out)
        right = _with_ours([case for case in self._cases(inputs) if self._is_right(case, inputs, wrong, left_out)])
        for scenario in self._spec.scenarios:
            failed, wrong_here = dict(left_out), dict(wrong)
            times = self._time(scenario, right, inputs, wrong_here, failed)
            row = self._row(scenario, inputs, right, times, wrong_here, failed)
            self._say(_progress(row))
            yield row

    def _open(self, backend: str | None) -> _Path:
        spec = self._spec
        group_map = GroupMap.custom({KIND: [list(range(spec.ranks))]})
        session = self._stack.enter_context(Session(group_map, device=spec.device, timeout_s=spec.timeout_s))
        session.prepare(
            KIND,
            hidden=spec.hidden,
            dtype=getattr(torch, spec.dtype),
            max_tokens=max(spec.tokens),
            rounding=_backends(spec.device).get(backend or "", "once"),
            backend=backend,
        )
        return _Path(split_choice(session.why(KIND, tokens=min(spec.tokens)).choice)[0].backend, session)

    def _add_path(self, backend: str) -> None:
        self._paths.append(self._open(backend))

    def _add_symmetric(self) -> None:
        self._others.append(SymmetricWays(self._work, max_tokens=max(self._spec.tokens)))

    def _add_kit(self, part: str, gloo: dist.ProcessGroup) -> None:
        directory, most = Path(str(self._spec.peers)), max(self._spec.tokens)
        self._others.append(Kit(directory, part, self._work, gloo, max_tokens=most))

    def _try(self, name: str, set_up: Callable[[], object]) -> None:
        """Set something up that is not there everywhere; a refusal is noted, and is the same on every rank."""
        if name in self._spec.without:
            self._left_out[name] = "left out as asked"
            return
        try:
            together(self._meeting, f"set-up of {name}", set_up)
        except CaseFailedError as e:
            # a plan's own reason says it in fewer words than the refusal that it led to
            self._left_out[name] = self._rejected.get(name, str(e))
            self._say(f"left out: {name}: {self._left_out[name]}")
        else:
            self._beside.append(name)

    def _cases(self, inputs: Inputs) -> Iterator[Case]:
        """Ours first and last, so that the noise between the two is that of the whole turn."""
        ours = _session_case(self._paths[0], Role.OURS, inputs)
        yield ours
        for path in self._paths[1:]:
            yield _session_case(path, Role.PEER, inputs)
        for other in self._others:
            yield from other.cases(inputs)
        yield again(ours)
        yield _session_sum(self._paths[0], ours)
        if self._spec.device == "cpu":
            yield _session_copied(self._paths[0], inputs)

    @property
    def _late_s(self) -> float:
        """How late this rank comes in the skewed scenario: the last one alone."""
        return self._spec.delay_us / 1e6 if self._work.rank == self._spec.ranks - 1 else 0.0

    def _is_right(
        self, case: Case, inputs: Inputs, wrong: dict[str, str], left_out: dict[str, str], late_s: float = 0.0
    ) -> bool:
        if case.name in self._spec.without:
            left_out[case.name] = "left out as asked"
            return False
        if case.gives is Gives.NOTHING or case.role is Role.AGAIN:
            return True
        try:
            problem = self._check(case, inputs, late_s)
        except CaseFailedError as e:
            left_out[case.name] = str(e)
            return False
        if problem:
            wrong[case.name] = problem
            self._say(f"WRONG at {inputs.x.shape[0]} tokens: {case.name}: {problem}")
        return not problem

    def _check(self, case: Case, inputs: Inputs, late_s: float = 0.0) -> str:
        """Three eager calls on whole numbers that change, and on a GPU three replays of a graph of one call.

        late_s: how late this rank comes to each.
        """
        case.load(inputs.x, inputs.residual)
        ways: list[Callable[[], Any]] = [case.call] if case.eager else []
        if self._spec.device == "cuda":
            from workbench.measure.graphs import record

            recorded = record(self._meeting, case, case.call, 1)

            def replay() -> Any:
                recorded.graph.replay()
                return recorded.given

            ways.append(replay)
        for way in ways:
            problem = check_case(self._meeting, self._work, case, inputs.weight, [_late(way, late_s)] * 3)
            if problem:
                return problem
        return ""

    def _is_right_in_chain(self, gemms: Gemms, case: Case, inputs: Inputs, wrong: dict[str, str]) -> bool:
        """Whether the sum is exact where products of whole numbers make x: a call that starts too early is not."""
        chained, problem = gemms.chained(case), ""
        run: Callable[[], Any] = chained.call
        try:
            if self._spec.device == "cuda":
                from workbench.measure.graphs import record

                case.load(inputs.x, inputs.residual)
                recorded = record(self._meeting, chained, chained.call, 1)

                def run() -> Any:
                    recorded.graph.replay()
                    return recorded.given

            for seed in range(3):
                products = []
                for rank in range(self._spec.ranks):
                    given, first, product = gemms.whole(rank, seed)
                    products.append(product.float())
                    if rank == self._work.rank:
                        gemms.given.copy_(given)
                        gemms.first.copy_(first)
                case.load(inputs.x, residual := self._work.whole_numbers(inputs.x.shape[0], seed)[1])
                self._meeting.meet()
                _, total = together(self._meeting, "a checked chain", run)
                mine = int((total.float() != torch.stack(products).sum(0) + residual.float()).sum())
                bad = sum(self._meeting.gather(mine))
                problem = problem or (f"between products: {bad} elements of sum + residual differ" if bad else "")
        except CaseFailedError as e:
            problem = str(e)
        if problem:
            wrong[case.name] = problem
        return not problem

    def _time(
        self,
        scenario: Scenario,
        cases: list[Case],
        inputs: Inputs,
        wrong: dict[str, str],
        failed: dict[str, str],
    ) -> dict[str, list[float]]:
        if scenario is Scenario.GEMM:
            tokens = inputs.x.shape[0]
            checked = Gemms.make(self._work, tokens)
            fused = _with_ours(
                [
                    c
                    for c in cases
                    if c.gives is Gives.FUSED
                    and (c.role is Role.AGAIN or self._is_right_in_chain(checked, c, inputs, wrong))
                ]
            )
            gemms = Gemms.make(self._work, tokens)
            cases = [gemms.alone(inputs), *(gemms.chained(c) for c in fused)]
        elif scenario is Scenario.SKEWED:
            waiting = [c for c in cases if c.gives in (Gives.FUSED, Gives.SUM)]
            cases = _with_ours([c for c in waiting if self._is_right(c, inputs, wrong, failed, self._late_s)])
        rounds = self._gpu_rounds if self._spec.device == "cuda" else self._host_rounds
        merge = from_last_arrival if scenario is Scenario.SKEWED and self._spec.device == "cpu" else max
        timed = rounds(scenario, cases, inputs, failed)
        times = time_rounds(self._meeting, timed, num_rounds=self._spec.rounds, merge=merge)
        delays = times.pop(_DELAY, None)
        if delays is not None:
            times = {n: [max(0.0, t - d) for t, d in zip(us, delays, strict=True)] for n, us in times.items()}
        return times

    def _host_rounds(
        self, scenario: Scenario, cases: list[Case], inputs: Inputs, failed: dict[str, str]
    ) -> dict[str, Round]:
        rounds: dict[str, Round] = {}
        for case in cases:
            variant = (_loader(case, inputs), case.call)
            if scenario is Scenario.SKEWED:
                delay_us = self._late_s * 1e6
                rounds[case.name] = skewed_host_round(self._meeting, variant, calls=self._spec.calls, delay_us=delay_us)
            else:
                rounds[case.name] = host_round(self._meeting, variant, calls=self._spec.calls)
        del failed  # what runs on the host was tried by the check
        return rounds

    def _gpu_rounds(
        self, scenario: Scenario, cases: list[Case], inputs: Inputs, failed: dict[str, str]
    ) -> dict[str, Round]:
        """In the skewed scenario the last rank's graph waits before each call; the wait alone is timed too."""
        from workbench.measure.graphs import cycles_of, graph_round, record, record_delay

        late = self._late_s > 0 and scenario is Scenario.SKEWED
        cycles = cycles_of(self._spec.delay_us) if late else 1
        rounds: dict[str, Round] = {}
        for case in cases:
            load = _loader(case, inputs)
            load()
            call = _after_delay(case.call, cycles) if late else case.call
            try:
                rounds[case.name] = graph_round(
                    self._meeting, record(self._meeting, case, call, self._spec.calls), load
                )
            except CaseFailedError as e:
                failed[case.name] = str(e)
        if scenario is Scenario.SKEWED:
            rounds[_DELAY] = graph_round(self._meeting, record_delay(cycles, self._spec.calls), lambda: None)
        return rounds

    def _row(
        self,
        scenario: Scenario,
        inputs: Inputs,
        cases: list[Case],
        times: dict[str, list[float]],
        wrong: dict[str, str],
        left_out: dict[str, str],
    ) -> Row:
        known = {case.name: (case.label, case.role) for case in cases}
        known[ALONE] = ("both products alone", Role.LIMIT)
        columns = tuple(
            Column(name=name, label=known[name][0], role=known[name][1], us=Spread.of(us)) for name, us in times.items()
        )
        peers = [c for c in columns if c.role is Role.PEER]
        best = min(peers, key=lambda c: c.us.median).name if peers else None
        ours = next((c.name for c in columns if c.role is Role.OURS), None)
        ratio = ratio_of(times[ours], times[best]) if best is not None and ours is not None else None
        tokens = inputs.x.shape[0]
        plan = self._paths[0].session.why(KIND, tokens=tokens)
        return Row(
            scenario=scenario,
            tokens=tokens,
            path=f"{plan.choice}: {plan.reason}",
            columns=columns,
            best_peer=best,
            ratio=ratio,
            wrong=tuple(wrong.items()),
            left_out=tuple(left_out.items()),
            simulated_us=simulate_us(
                describe_device(self._spec.device),
                ranks=self._spec.ranks,
                message_bytes=inputs.x.numel() * inputs.x.itemsize,
            )
            if scenario is Scenario.TOGETHER
            else None,
        )


def ratio_of(ours: list[float], theirs: list[float]) -> Spread | None:
    """Ours over theirs, round by round; None if some round took no time that could be told from the wait."""
    if min(*ours, *theirs) <= 0:
        return None
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])


def _session_case(path: _Path, role: Role, inputs: Inputs, x: torch.Tensor | None = None) -> Case:
    """x: where the caller's rows lie; by default where peers read them in place, if there is such memory."""
    x = path.session.empty(tuple(inputs.x.shape), inputs.x.dtype, group=KIND) if x is None else x
    residual = torch.empty_like(inputs.x)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        out = path.session.all_reduce_add_rms_norm(x, residual, inputs.weight, eps=EPS, group=KIND)
        return out.norm, out.residual

    if path.session.device == "cuda":  # into a graph of ours, which a session does not know
        workspace = _workspace(path, inputs.x)

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            out = workspace.all_reduce_add_rms_norm(x, residual, inputs.weight, eps=EPS, weight_bias=0.0)
            return out.norm, out.residual

    return Case(name=path.name, label=path.name, role=role, gives=Gives.FUSED, x=x, residual=residual, call=call)


def _session_copied(path: _Path, inputs: Inputs) -> Case:
    """The same from the caller's own memory, which peers cannot read in place."""
    case = _session_case(path, Role.PART, inputs, torch.empty_like(inputs.x))
    return replace(case, name=f"{path.name} copied", label=f"{path.name}, x copied in")


def _session_sum(path: _Path, fused: Case) -> Case:
    """The sum alone, on the fused case's own x."""
    sum_up: Callable[[torch.Tensor], torch.Tensor] = partial(path.session.all_reduce, group=KIND)
    if path.session.device == "cuda":
        sum_up = _workspace(path, fused.x).all_reduce
    return replace(
        fused,
        name=f"{path.name} sum",
        label=f"{path.name}, sum alone",
        role=Role.PART,
        gives=Gives.SUM,
        call=lambda: (None, sum_up(fused.x)),
    )


def _workspace(path: _Path, x: torch.Tensor) -> Workspace:
    return find_workspace(path.session, KIND, hidden=x.shape[1], dtype=x.dtype, tokens=x.shape[0])


def _with_ours(cases: list[Case]) -> list[Case]:
    """The cases, without a second timing of ours where the first is not there: it was wrong or failed."""
    there = any(case.role is Role.OURS for case in cases)
    return [case for case in cases if there or case.role is not Role.AGAIN]


def _late(call: Callable[[], Any], late_s: float) -> Callable[[], Any]:
    """The call after so long a sleep of the host."""

    def after_sleep() -> Any:
        time.sleep(late_s)
        return call()

    return after_sleep if late_s else call


def _loader(case: Case, inputs: Inputs) -> Callable[[], None]:
    return lambda: case.load(inputs.x, inputs.residual)


def _after_delay(call: Callable[[], Any], cycles: int) -> Callable[[], Any]:
    from workbench.measure.graphs import wait_cycles

    def late() -> Any:
        wait_cycles(cycles)
        return call()

    return late


def _progress(row: Row) -> str:
    ours = row.column(Role.OURS)
    best = row.named(row.best_peer)
    told = ["our way is not timed" if ours is None else f"{ours.name} {ours.us.median:.2f} us"]
    if best is not None:
        told.append(f"best peer {best.label} {best.us.median:.2f} us")
    if row.ratio is not None:
        told.append(f"ours / best peer {row.ratio.median:.3f} [{row.ratio.p10:.3f}, {row.ratio.p90:.3f}]")
    return f"{row.scenario.value}, {row.tokens} tokens: {', '.join(told)}"
