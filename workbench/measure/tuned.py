"""The tuned table of a machine: measured rows for the width that was measured, the cost model's for the others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from workbench.documents import show_value
from workbench.errors import ArgumentError
from workbench.measure.roofline import Rates, find_crossover, find_rates, fit_line, link_bytes
from workbench.plan import DTYPE_BYTES, Algorithm
from workbench.trace import Comparison, Role, Scenario

WIDTHS = range(2, 17)
MODELLED = range(2, 9)
_UNMEASURED_MOST = 16 << 20
_BLOCKS = {Algorithm.PUSH: "sms", Algorithm.PULL: "64", Algorithm.TWO_SHOT_PUSH: "sms"}


class NothingWonError(ArgumentError):
    """Our way was slower than the best peer at every size."""


def tuned_table(comparisons: Sequence[Comparison], *, command: str) -> dict[str, Any]:
    """The document of a plan table, made from runs of one machine and one number of ranks.

    A size that our way serves at least as fast as the best peer is in a measured row; one that it does not serve so is
    in none, and falls through to the next path. Other widths get rows of the cost model, fitted to these runs; their
    standing is default. Pure.
    Raises: ArgumentError for runs of different machines or widths, for files that no run wrote; NothingWonError for
    runs in which nothing was won.
    """
    first = comparisons[0]
    for name in ("device", "ranks"):
        found = sorted({str(getattr(c, name)) for c in comparisons})
        if len(found) > 1:
            raise ArgumentError(f"runs of different {name}: {', '.join(found)}; take those of one machine and width")
    if unknown := {c.dtype for c in comparisons} - set(DTYPE_BYTES):
        raise ArgumentError(f"dtype={min(unknown)!r}; allowed: {', '.join(DTYPE_BYTES)}")
    if first.ranks not in WIDTHS:
        raise ArgumentError(f"a run of {first.ranks} ranks; allowed: {WIDTHS.start} to {WIDTHS.stop - 1}")
    algorithm = Algorithm.PULL if _arch(first) == "cpu" else Algorithm.PUSH
    won = _won_sizes(comparisons)
    if not any(won.values()):
        raise NothingWonError("our way was faster than the best peer at no size, so there is nothing for a table")
    rates = _fitted(comparisons)
    largest = max(size for size, ours in won.items() if ours)
    measured = {
        "graph": [_row(algorithm, largest)],
        "eager": [_row(algorithm, largest)],
        "fused": list(_measured_rows(won, algorithm)),
        "blocks": {algorithm.value: _BLOCKS[algorithm]},
        "max_message": _size(largest),
        "provenance": _provenance(first, _source(comparisons), command),
    }
    entries = {str(ws): _modelled(rates, ws) for ws in MODELLED} if rates is not None else {}
    entries[str(first.ranks)] = measured
    model = "no cost model knows this device" if rates is None else "simulated: " + _model_text(rates)
    return {
        "schema": 1,
        "table": f"{_arch(first)}-tuned",
        "arches": [_arch(first)],
        "standing": "default",
        "provenance": _provenance(first, model, command),
        "max_message": _size(_UNMEASURED_MOST),
        "world_sizes": dict(sorted(entries.items(), key=lambda item: int(item[0]))),
        "absent": {str(ws): "neither measured nor in the cost model" for ws in WIDTHS if str(ws) not in entries},
    }


def _arch(comparison: Comparison) -> str:
    """Raises ArgumentError for a text that no run writes."""
    arch = comparison.about.get("arch", "cpu")
    if not isinstance(arch, str) or not re.fullmatch(r"cpu|sm\d{2,3}", arch):
        raise ArgumentError(f"about: arch is {show_value(arch)}; allowed: cpu, or one such as sm90")
    return arch


def _won_sizes(comparisons: Sequence[Comparison]) -> dict[int, bool]:
    """By bytes of a message, ascending: whether ours was at least as fast as the best peer wherever it was timed."""
    found: dict[int, bool] = {}
    for comparison in comparisons:
        row_bytes = comparison.hidden * DTYPE_BYTES[comparison.dtype]
        for row in comparison.rows:
            if row.scenario is Scenario.TOGETHER and row.best_peer is not None:
                size = row.tokens * row_bytes
                ours = row.ratio is not None and row.ratio.median <= 1.0
                found[size] = found.get(size, True) and ours
    return dict(sorted(found.items()))


def _measured_rows(won: dict[int, bool], algorithm: Algorithm) -> Iterator[dict[str, str]]:
    """A row for each run of sizes that were won; the first begins at 0 bytes if the smallest size was won."""
    sizes = list(won)
    start: int | None = None
    for i, size in enumerate(sizes):
        if won[size] and start is None:
            start = 0 if i == 0 else size
        last = i + 1 == len(sizes) or not won[sizes[i + 1]]
        if start is not None and won[size] and last:
            row = _row(algorithm, size)
            yield {**row, **({"from": _size(start)} if start else {}), "standing": "measured"}
            start = None


def _modelled(rates: Rates, ws: int) -> dict[str, Any]:
    """One-shot up to where two-shot is predicted to be faster; the fused kernels are one-shot."""
    crossover = find_crossover(rates, Algorithm.PUSH, Algorithm.TWO_SHOT_PUSH, ws)
    most = 128 << 20
    small = _row(Algorithm.PUSH, min(most, crossover or most) // 1024 * 1024)
    rows = [small] if crossover is None else [small, _row(Algorithm.TWO_SHOT_PUSH, most)]
    used = (Algorithm.PUSH,) if crossover is None else (Algorithm.PUSH, Algorithm.TWO_SHOT_PUSH)
    blocks = {a.value: _BLOCKS[a] for a in used}
    return {"graph": rows, "eager": rows, "fused": [small], "blocks": blocks}


def _fitted(comparisons: Sequence[Comparison]) -> Rates | None:
    """The rates of the device with latency and link of these runs, if a line fits them; None for unknown devices."""
    known = find_rates(comparisons[0].device)
    if known is None:
        return None
    points = []
    for comparison in comparisons:
        for row in comparison.rows:
            ours = row.column(Role.OURS)
            if row.scenario is Scenario.TOGETHER and ours is not None and ours.us.median > 0:
                size = row.tokens * comparison.hidden * DTYPE_BYTES[comparison.dtype]
                points.append((link_bytes(Algorithm.PUSH, comparison.ranks, size), ours.us.median))
    try:
        latency_us, link_gb_s = fit_line(points)
    except ArgumentError:  # too few sizes, or all noise: the shipped rates were fitted to more
        return known
    return replace(known, latency_us=latency_us, link_gb_s=link_gb_s)


def _model_text(rates: Rates) -> str:
    return (
        f"cost model {rates.latency_us:.2f} us + bytes over {rates.link_gb_s:.0f} GB/s; "
        f"one-shot up to where two-shot with barriers is predicted to be faster"
    )


def _source(comparisons: Sequence[Comparison]) -> str:
    hidden = ", ".join(str(c.hidden) for c in comparisons)
    commit = comparisons[0].about.get("commit", "unknown")
    return f"fused kernel beside the best peer, hidden {hidden}, {comparisons[0].dtype}, commit {commit}"


def _provenance(comparison: Comparison, source: str, command: str) -> dict[str, str]:
    about = comparison.about
    return {
        "device": comparison.device,
        "date": str(about.get("date", "unknown"))[:10],
        "driver": str(about.get("driver") or "none"),
        "source": source,
        "command": command,
    }


def _row(algorithm: Algorithm, up_to: int) -> dict[str, str]:
    return {"algorithm": algorithm.value, "up_to": _size(up_to)}


def _size(size: int) -> str:
    """As a table writes it: bytes, K or M; exact, or down to the next 1024 bytes where six digits do not hold it."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "K"), (1, "")):
        if size % unit == 0 and size // unit < 10**6:
            return f"{size // unit}{name}"
    return f"{size // 1024}K"
