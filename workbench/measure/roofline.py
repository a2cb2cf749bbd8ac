"""The cost model: latency + the larger of two times, bytes over the link and bytes over the memory. Pure.

What it gives is simulated: good for which algorithm at which size, and for what a kernel leaves on the table. Its
numbers are fitted to measurements (`fit_line`) and lie in rates.json with their provenance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from workbench.documents import Document, parse_document
from workbench.errors import ArgumentError
from workbench.plan import Algorithm

LARGEST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a machine does. latency_us: one-shot push of nothing. link_gb_s: one direction, both busy, 10^9 bytes.

    hop_us: one more exchange of data that is its own flag.   barrier_us: one more exchange of flags that order data.
    """

    device: str
    latency_us: float
    link_gb_s: float
    memory_gb_s: float
    hop_us: float
    barrier_us: float
    provenance: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A figure that others published, with what it was about."""

    source: str
    what: str
    hardware: str
    ranks: int
    message_bytes: int
    algorithm: Algorithm
    us: float


def link_bytes(algorithm: Algorithm, ranks: int, message_bytes: float) -> float:
    """Bytes each rank sends (and receives) over its links. One-shot: all to all peers. Two-shot: shares, twice."""
    if algorithm in (Algorithm.PUSH, Algorithm.STREAM, Algorithm.PULL):
        return (ranks - 1) * message_bytes
    if algorithm is Algorithm.MULTICAST:
        return message_bytes * (1 + 1 / ranks)
    return 2 * (ranks - 1) / ranks * message_bytes


def memory_bytes(algorithm: Algorithm, ranks: int, message_bytes: float) -> float:
    """Bytes each rank's own memory reads and writes, with the add and the norm in the same kernel.

    push: x read, what peers stored written, read and reset, residual in and out, norm out.
    pull: x read by its owner and by each peer, residual in and out, norm out.   two-shot: a share each way besides.
    """
    others = ranks - 1
    if algorithm in (Algorithm.PUSH, Algorithm.STREAM):
        return (2 * others + 4) * message_bytes
    if algorithm is Algorithm.PULL:
        return (others + 4) * message_bytes
    return (4 + 4 * others / ranks) * message_bytes


def predict_us(rates: Rates, algorithm: Algorithm, *, ranks: int, message_bytes: float) -> float:
    """Microseconds of one call. Raises ArgumentError for fewer than two ranks."""
    if ranks < 2:
        raise ArgumentError(f"ranks={ranks}; allowed: 2 and more, since one rank exchanges nothing")
    over_link = link_bytes(algorithm, ranks, message_bytes) / rates.link_gb_s
    over_memory = memory_bytes(algorithm, ranks, message_bytes) / rates.memory_gb_s
    return _latency_us(rates, algorithm) + max(over_link, over_memory) / 1e3


def find_crossover(rates: Rates, small: Algorithm, large: Algorithm, ranks: int) -> int | None:
    """The largest message that `small` is predicted to serve at least as fast as `large`; None if it always does."""

    def wins(size: int) -> bool:
        return predict_us(rates, small, ranks=ranks, message_bytes=size) <= predict_us(
            rates, large, ranks=ranks, message_bytes=size
        )

    if wins(LARGEST_BYTES):
        return None
    low, high = 0, LARGEST_BYTES
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if wins(middle) else (low, middle)
    return low


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(latency in us, rate in 10^9 bytes a second) of points (bytes, us): the least sum of squared relative errors.

    Raises: ArgumentError unless there are two sizes and the time grows with them.
    """
    weights = [(1 / us**2, size, us) for size, us in points]
    n = sum(w for w, _, _ in weights)
    x = sum(w * size for w, size, _ in weights)
    xx = sum(w * size**2 for w, size, _ in weights)
    y = sum(w * us for w, _, us in weights)
    xy = sum(w * size * us for w, size, us in weights)
    determinant = n * xx - x * x
    slope = (n * xy - x * y) / determinant if determinant > 0 else 0.0
    if slope <= 0:
        raise ArgumentError(f"{len(points)} points; a fit needs two sizes at least, and times that grow with them")
    return (y * xx - x * xy) / determinant, 1e-3 / slope


def find_rates(device: str) -> Rates | None:
    """The rates of a device by its name, or None if nothing was fitted to it."""
    return _shipped_rates().get(device)


def simulate_us(device: str, *, ranks: int, message_bytes: int) -> float | None:
    """What the model says of one-shot push on a known device, None on others."""
    rates = find_rates(device)
    return None if rates is None else predict_us(rates, Algorithm.PUSH, ranks=ranks, message_bytes=message_bytes)


@cache
def published_figures() -> tuple[Published, ...]:
    """Figures of others, to be shown beside what the model says of them."""
    doc = _shipped("published.json")
    doc.take_whole("schema", 1, 1)
    figures = []
    for entry in doc.take_children("figures"):
        figures.append(
            Published(
                source=entry.take_text("source"),
                what=entry.take_text("what"),
                hardware=entry.take_text("hardware"),
                ranks=entry.take_whole("ranks", 2, 1024),
                message_bytes=entry.take_whole("message_bytes", 1, LARGEST_BYTES),
                algorithm=entry.take_choice("algorithm", Algorithm),
                us=_positive(entry, "us"),
            )
        )
        entry.end()
    doc.end()
    return tuple(figures)


@cache
def _shipped_rates() -> Mapping[str, Rates]:
    doc = _shipped("rates.json")
    doc.take_whole("schema", 1, 1)
    machines = {}
    for entry in doc.take_children("machines"):
        origin = entry.take_child("provenance")
        rates = Rates(
            device=entry.take_text("device"),
            **{n: _positive(entry, n) for n in ("latency_us", "link_gb_s", "memory_gb_s", "hop_us", "barrier_us")},
            provenance={name: origin.take_text(name) for name in ("date", "driver", "source", "command")},
        )
        origin.end()
        entry.end()
        machines[rates.device] = rates
    doc.end()
    return machines


def _shipped(name: str) -> Document:
    return parse_document((files("workbench.measure") / name).read_text(encoding="utf-8"), name)


def _positive(doc: Document, name: str) -> float:
    value = doc.take_value(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        doc.refuse(f"{name} must be a number above 0")
    return float(value)


def _latency_us(rates: Rates, algorithm: Algorithm) -> float:
    """push: data that is its own flag, once.   two_shot_push: twice.   The pulling ones order data by barriers."""
    more = {
        Algorithm.PUSH: 0.0,
        Algorithm.STREAM: 0.0,
        Algorithm.TWO_SHOT_PUSH: rates.hop_us,
        Algorithm.PULL: rates.barrier_us,
        Algorithm.TWO_SHOT_PULL: 2 * rates.barrier_us,
        Algorithm.MULTICAST: 2 * rates.barrier_us,
    }
    return rates.latency_us + more[algorithm]
