"""What ranks do in the tests of the live comparison."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from workbench.backends import gloo
from workbench.measure import Case, FusedSpec, Gives, SessionMeeting, Work, check_case, fused, measure_fused
from workbench.measure.case import together
from workbench.measure.chain import Gemms
from workbench.measure.timing import skewed_host_round
from workbench.ranks import GroupMap
from workbench.runtime import Session
from workbench.trace import Role, Scenario

SMALL = FusedSpec(
    device="cpu", ranks=2, hidden=64, tokens=(1, 5), rounds=3, calls=2, delay_us=20_000, scenarios=tuple(Scenario)
)


def compare(spec: FusedSpec) -> Any:
    """(the result as JSON, how often it was saved and whether it was finished each time)."""
    saved: list[tuple[int, bool]] = []
    result = measure_fused(spec, save=lambda c: saved.append((len(c.rows), c.finished)))
    return result.to_json(), saved


def compare_with_a_way_that_fails_when_late() -> Any:
    """The result where gloo forgets the last member on a rank that has just slept, as a late one does."""
    slept: list[float] = []
    fused.time = SimpleNamespace(sleep=slept.append)  # type: ignore[assignment] # only this process, which ends next
    right = gloo._fused
    gloo._fused = lambda parts, *rest: right(parts[:-1] if slept and slept.pop() else parts, *rest)
    return compare(spec(tokens=(3,), scenarios=(Scenario.TOGETHER, Scenario.SKEWED)))[0]


class CountingMeeting(SessionMeeting):
    """Counts the calls since the ranks met."""

    calls = 0

    def meet(self) -> None:
        super().meet()
        self.calls = 0


def check(fault: str, gives: Gives = Gives.FUSED, dtype: torch.dtype = torch.float32) -> str:
    """What the check says of a way with a fault, on two ranks."""
    with Session(GroupMap.build("sglang", tp=2), device="cpu", timeout_s=20) as session:
        session.prepare("tp", hidden=32, dtype=dtype, max_tokens=4)
        rank = session.world_rank
        work = Work(rank=rank, ranks=2, hidden=32, dtype=dtype, device="cpu")
        inputs = work.random(4)
        x, residual = torch.empty_like(inputs.x), torch.empty_like(inputs.x)

        def call() -> Any:
            if fault == "residual on every rank":
                out = session.all_reduce_add_rms_norm(
                    x + residual, torch.zeros_like(x), inputs.weight, eps=1e-6, group="tp"
                )
                return out.norm, out.residual
            if gives is Gives.SUM:
                total = session.all_reduce(x, group="tp")
                if fault == "one element" and rank == 1:
                    total[3, 7] += 1
                return None, total
            out = session.all_reduce_add_rms_norm(x, residual, inputs.weight, eps=1e-6, group="tp")
            norm, total = out.norm.clone(), out.residual.clone()
            if fault == "one element" and rank == 1:
                total[3, 7] += 1
            if fault == "norm without eps and weight":
                norm = total * torch.rsqrt(total.square().mean(-1, keepdim=True))
            if fault == "nan":
                norm[0, 0] = float("nan")
            if fault == "one element of the norm":
                norm.view(-1)[(norm.abs() - 1).abs().argmin()] *= 1.05
            if fault == "back to back" and meeting.calls:
                total[3, 7] += 1
            meeting.calls += 1
            return norm, total

        case = Case(name="way", label="way", role=Role.PEER, gives=gives, x=x, residual=residual, call=call)
        meeting = CountingMeeting(session, "tp")
        return check_case(meeting, work, case, inputs.weight, [case.call] * 3)


def fail_on_one(rank: int) -> None:
    """A step that raises on world rank 1 only."""
    with Session(GroupMap.build("sglang", tp=2), device="cpu", timeout_s=20) as session:

        def step() -> None:
            if rank == 1:
                raise RuntimeError("no such kernel\nin this build")

        together(SessionMeeting(session, "tp"), "set-up of it", step)


def arrivals(rank: int, delay_us: float) -> list[int]:
    """When this rank came to each of three calls, in nanoseconds of the host's clock; rank 1 comes late."""
    with Session(GroupMap.build("sglang", tp=2), device="cpu", timeout_s=20) as session:
        meeting = SessionMeeting(session, "tp")
        nothing = (lambda: None, lambda: None)
        once = skewed_host_round(meeting, nothing, calls=3, delay_us=delay_us * rank)
        return [arrival for arrival, _ in once()]


def products(rank: int) -> tuple[bool, float, int]:
    """Whether whole-number matrices multiply to the product that any rank can make, its size, and the inner size."""
    work = Work(rank=rank, ranks=2, hidden=48, dtype=torch.bfloat16, device="cpu")
    gemms = Gemms.make(work, 3)
    given, first, product = gemms.whole(rank, 1)
    return torch.equal(given @ first, product), float(product.abs().max()), given.shape[1]


def spec(**changes: Any) -> FusedSpec:
    """SMALL with changes."""
    return replace(SMALL, **changes)
