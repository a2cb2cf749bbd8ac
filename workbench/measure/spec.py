"""What one comparison is asked to do: a record that travels from the command to every rank as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from workbench.errors import ArgumentError
from workbench.plan import DTYPE_BYTES
from workbench.trace import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedSpec:
    """Sizes, device and method of one comparison of the fused operation.

    rounds: times each way is timed, in turns.   calls: back to back within a round.   delay_us: how late the last rank
    comes in the skewed scenario.   peers: directory of a kit of other systems' kernels.
    without: names of ways, or of what they come from, that are left out.
    timeout_s: for any wait on a rank.   limit_s: for the whole job.
    """

    device: str
    ranks: int
    hidden: int
    tokens: tuple[int, ...]
    dtype: str = "bfloat16"
    scenarios: tuple[Scenario, ...] = (Scenario.TOGETHER,)
    rounds: int = 15
    calls: int = 20
    delay_us: float = 200.0
    peers: str | None = None
    without: tuple[str, ...] = ()
    timeout_s: float = 60.0
    limit_s: float = 600.0
    command: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ArgumentError(f"dtype={self.dtype!r}; allowed: {', '.join(DTYPE_BYTES)}")
        if self.hidden < 8 or self.hidden % 8:
            raise ArgumentError(f"hidden={self.hidden}; allowed: multiples of 8 from 8 on")
        if not self.tokens or min(self.tokens) < 1 or not self.scenarios:
            raise ArgumentError(f"tokens={self.tokens}, scenarios={self.scenarios}; at least one of each, from 1 on")
        if not 2 <= self.ranks <= 16:
            raise ArgumentError(f"ranks={self.ranks}; allowed: 2 to 16, ranks of one host")

    @property
    def method(self) -> str:
        """How the times came about, in words."""
        clock = (
            f"CUDA graph of {self.calls} calls, another replay queued ahead, device events"
            if self.device == "cuda"
            else f"{self.calls} calls back to back after a warm one, host clock"
        )
        return (
            f"{clock}; {self.rounds} rounds, ways in turns; slowest rank of each round; median, p10 and p90 of rounds; "
            f"multicast off"
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "scenarios": [s.value for s in self.scenarios]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> FusedSpec:
        """What to_json gave."""
        scenarios = tuple(Scenario(s) for s in data["scenarios"])
        lists = {name: tuple(data[name]) for name in ("tokens", "without")}
        return cls(**{**data, **lists, "scenarios": scenarios})
