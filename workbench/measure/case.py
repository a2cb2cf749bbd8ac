"""Case: one way to do the work, on tensors of its own; and the check that comes before any time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from workbench.errors import WorkbenchError
from workbench.fabric import name_ranks
from workbench.measure.timing import Meeting, synchronize
from workbench.ops import add_rms_norm
from workbench.trace import Role

EPS = 1e-6
_SMALL = 1 / 64
"""Elements of a norm below this are compared as if they were so large."""


class Gives(Enum):
    """What a case's call gives back: (norm, sum + residual), (None, sum over the ranks), (norm, own x + residual), or
    nothing to look at."""

    FUSED = "fused"
    SUM = "sum"
    NORM = "norm"
    NOTHING = "nothing"


class CaseFailedError(WorkbenchError, RuntimeError):
    """A step of one case failed on some rank; raised alike on every rank, so the others can go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way. call() works on x and residual, which it may overwrite, so both are loaded anew before each round.

    eager: may run outside a graph.   after_capture: must run on every rank between a capture and its first replay.
    """

    name: str
    label: str
    role: Role
    gives: Gives
    x: torch.Tensor
    residual: torch.Tensor
    call: Callable[[], tuple[torch.Tensor | None, torch.Tensor | None]]
    eager: bool = True
    after_capture: Callable[[], object] | None = None

    def load(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        self.x.copy_(x)
        self.residual.copy_(residual)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What every case is given: x of this rank, and what all ranks share."""

    x: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Which ranks do what: sizes, device and this rank's place."""

    rank: int
    ranks: int
    hidden: int
    dtype: torch.dtype
    device: str

    def random(self, tokens: int) -> Inputs:
        """Normal values; x differs from rank to rank. Never zeros: they run faster than data does."""
        shape = (tokens, self.hidden)
        return Inputs(
            x=self._draw(shape, 1 + self.rank),
            residual=self._draw(shape, 1000),
            weight=self._draw((self.hidden,), 1001),
        )

    def _draw(self, shape: tuple[int, ...], seed: int) -> torch.Tensor:
        generator = torch.Generator(device=self.device).manual_seed(seed)
        return torch.randn(shape, device=self.device, generator=generator).to(self.dtype)

    def whole_numbers(self, tokens: int, seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Every rank's x and the residual, from -8 to 8: any sum of up to 16 ranks is exact in each dtype."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        shape = (tokens, self.hidden)
        drawn = [
            torch.randint(-8, 9, shape, device=self.device, generator=generator).to(self.dtype)
            for _ in range(self.ranks + 1)
        ]
        return drawn[:-1], drawn[-1]


def together(meeting: Meeting, what: str, step: Callable[[], Any]) -> Any:
    """step() on every rank, then wait for the device and for all. Raises CaseFailedError everywhere if it failed
    anywhere."""
    result, problem = None, ""
    try:
        result = step()
        synchronize(meeting.device)
    except Exception as e:  # whatever another system's kernel raises is that column's story, not the end of the run
        problem = f"{type(e).__name__}: {' '.join(str(e).split())}"[:300]
    told: dict[str, list[int]] = {}
    for rank, text in enumerate(meeting.gather(problem)):
        told.setdefault(text, []).append(rank)
    failed = [f"{name_ranks(ranks)}: {text}" for text, ranks in told.items() if text]
    if failed:
        raise CaseFailedError(f"{what}: {'; '.join(failed)}"[:1000])
    return result


def check_case(
    meeting: Meeting, work: Work, case: Case, weight: torch.Tensor, runs: Sequence[Callable[[], Any]]
) -> str:
    """What is wrong with the runs, each of which does case's work once, on whole numbers; "" if nothing is.

    They follow each other as they do when they are timed: the ranks meet before the first only, and each run has
    numbers of its own. The sum, and sum + residual, must be exact. The norm must lie within one unit of the last place
    of fp32 arithmetic, as ||norm - wanted|| / ||wanted||, and each element within two: one wrong row of many counts.
    Collective: the same on every rank.
    """
    tokens = case.x.shape[0]
    given = []
    for seed in range(len(runs)):
        parts, residual = work.whole_numbers(tokens, seed)
        given.append((parts[work.rank], residual))
        del parts

    def run_all() -> list[tuple[torch.Tensor | None, torch.Tensor | None]]:
        results = []
        for (x, residual), run in zip(given, runs, strict=True):
            case.load(x, residual)
            norm, total = run()
            results.append((_kept(norm), _kept(total)))
        return results

    meeting.meet()
    results = together(meeting, "checked calls", run_all)
    problem = ""
    for seed, (norm, total) in enumerate(results):
        problem = problem or _problem_of(work, case, weight, seed, norm, total)
    told = meeting.gather(problem)
    return next((f"world rank {r}: {what}" for r, what in enumerate(told) if what), "")


def _kept(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A copy that the next call does not write over."""
    return None if tensor is None else tensor.clone()


def _problem_of(
    work: Work, case: Case, weight: torch.Tensor, seed: int, norm: torch.Tensor | None, total: torch.Tensor | None
) -> str:
    if case.gives is Gives.NOTHING:
        return ""
    parts, residual = work.whole_numbers(case.x.shape[0], seed)
    if case.gives is Gives.NORM:
        parts = [parts[work.rank]]
    summed = torch.zeros_like(residual, dtype=torch.float32)
    for part in parts:
        summed += part
    assert total is not None
    if case.gives is Gives.SUM:
        return _differs("sum", total, summed)
    wanted = add_rms_norm(summed, residual.float(), weight.float(), eps=EPS, weight_bias=0.0)
    if problem := _differs("sum + residual", total, wanted.residual):
        return problem
    assert norm is not None
    limit = max(torch.finfo(work.dtype).eps, 4e-6)
    off = (norm.float() - wanted.norm).abs()
    error = float(off.norm() / wanted.norm.norm())
    if not error <= limit:
        return f"norm off by {error:.2g}, allowed {limit:.2g}"
    worst = float((off / wanted.norm.abs().clamp(min=_SMALL)).max())
    if not worst <= 2 * limit:
        return f"an element of the norm is off by {worst:.2g}, allowed {2 * limit:.2g}"
    return ""


def _differs(what: str, got: torch.Tensor, wanted: torch.Tensor) -> str:
    count = int((got.float() != wanted).sum())
    return f"{what}: {count} of {wanted.numel()} elements differ" if count else ""


def again(case: Case) -> Case:
    """The same case under another name: the gap between the two is the noise."""
    return replace(case, name=f"{case.name} again", label=f"{case.label} again", role=Role.AGAIN)
