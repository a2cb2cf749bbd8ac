"""The operation where it stands in a model: a matrix product before it makes x, another one after it takes the norm."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from workbench.measure.case import Case, Gives, Inputs, Work
from workbench.trace import Role

ALONE = "gemms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemms:
    """before: [tokens, inner] @ [inner, hidden] -> x;   after: norm @ [hidden, inner]. Inner is hidden over the ranks,
    as for an output projection whose input is split."""

    given: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    result: torch.Tensor

    @classmethod
    def make(cls, work: Work, tokens: int) -> Gemms:
        """Random matrices; the products keep the size of what goes in."""
        inner = max(8, work.hidden // work.ranks // 8 * 8)

        def draw(rows: int, columns: int, scale: float) -> torch.Tensor:
            return (torch.randn(rows, columns, device=work.device) * scale).to(work.dtype)

        return cls(
            given=draw(tokens, inner, 1.0),
            first=draw(inner, work.hidden, inner**-0.5),
            second=draw(work.hidden, inner, work.hidden**-0.5),
            result=torch.empty(tokens, inner, device=work.device, dtype=work.dtype),
        )

    def whole(self, rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(given, first, their product) of a rank, made anywhere: whole numbers from -8 to 8, so the product is exact.

        A row of `given` has one number that is not zero.
        """
        device = self.given.device
        generator = torch.Generator(device=device).manual_seed(64 * seed + rank)

        def draw(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, device=device, generator=generator)

        tokens, inner = self.given.shape
        at, number = draw(0, inner, tokens), draw(-8, 9, tokens).to(self.given.dtype)
        given = torch.zeros_like(self.given).scatter_(1, at[:, None], number[:, None])
        first = draw(-1, 2, *self.first.shape).to(self.first.dtype)
        return given, first, number[:, None] * first[at]

    def chained(self, case: Case) -> Case:
        """The case with a product before and after it."""

        def call() -> tuple[torch.Tensor | None, torch.Tensor | None]:
            torch.mm(self.given, self.first, out=case.x)
            norm, total = case.call()
            if norm is not None:
                torch.mm(norm, self.second, out=self.result)
            return norm, total

        return replace(case, call=call)

    def alone(self, inputs: Inputs) -> Case:
        """Both products and nothing between them."""
        x, residual = torch.empty_like(inputs.x), torch.empty_like(inputs.x)

        def call() -> tuple[None, None]:
            torch.mm(self.given, self.first, out=x)
            torch.mm(x, self.second, out=self.result)
            return None, None

        return Case(
            name=ALONE,
            label="both products alone",
            role=Role.LIMIT,
            gives=Gives.NOTHING,
            x=x,
            residual=residual,
            call=call,
        )
