"""Comparisons made by hand, for tests of what is done with them."""

from __future__ import annotations

from workbench.trace import Column, Comparison, Role, Row, Scenario, Spread


def around(us: float) -> Spread:
    """The time with 2 % on both sides."""
    return Spread(us, us * 0.98, us * 1.02)


def row(tokens: int, ours: float | None, peer: float, scenario: Scenario = Scenario.TOGETHER) -> Row:
    """Ours, where it is not None, and one peer."""
    columns = [Column(name="nccl+norm", label="NCCL + norm", role=Role.PEER, us=around(peer))]
    if ours is not None:
        columns.insert(0, Column(name="custom", label="custom", role=Role.OURS, us=around(ours)))
    return Row(
        scenario=scenario,
        tokens=tokens,
        path="custom: first",
        columns=tuple(columns),
        best_peer="nccl+norm",
        ratio=None if ours is None else around(ours / peer),
    )


def comparison(
    *rows: Row,
    ranks: int = 2,
    hidden: int = 4096,
    device: str = "NVIDIA H200",
    dtype: str = "bfloat16",
    **about: str | int,
) -> Comparison:
    """A finished one on GPUs; hidden 4096 in bfloat16 is 8 KiB a token."""
    return Comparison(
        ranks=ranks,
        hidden=hidden,
        dtype=dtype,
        device=device,
        about={"arch": "sm90", "date": "2026-11-29T12:00:00+00:00", "driver": "580.1", "commit": "abc", **about},
        rows=rows,
        finished=True,
    )
