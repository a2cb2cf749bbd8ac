"""What one demo run is asked to do: a record that travels from the command to every rank as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from workbench.demo.directory import write_private
from workbench.ranks import GroupMap

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSpec:
    """Layout, device and sizes of one run. `timeout_s` bounds each wait on a rank, `limit_s` the whole job."""

    system: str
    sizes: dict[str, Any]
    device: str
    hidden: int = 4096
    dtype: str = "bfloat16"
    tokens: tuple[int, ...] = (1, 8, 64)
    rounds: int = 5
    timeout_s: float = 60.0
    limit_s: float = 600.0
    seed: int = 2026
    launch_checks: bool = field(default=True)

    def group_map(self) -> GroupMap:
        """The group map of the layout."""
        return GroupMap.build(self.system, launch_checks=self.launch_checks, **self.sizes)

    def save(self, path: Path) -> None:
        """Write the spec as JSON."""
        write_private(path, json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> DemoSpec:
        """Read what `save` wrote."""
        data = json.loads(path.read_text())
        return cls(**{**data, "tokens": tuple(data["tokens"])})


def default_layout(ranks: int) -> tuple[str, dict[str, Any]]:
    """A layout that shows several kinds of subgroup on `ranks` ranks: halves by context and by expert where even."""
    sizes = {"tp": ranks}
    if ranks % 2 == 0 and ranks > 2:
        sizes |= {"attn_cp": 2, "moe_ep": 2}
    return "sglang", sizes
