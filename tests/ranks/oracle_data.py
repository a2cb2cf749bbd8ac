"""The recorded answers of SGLang, vLLM and Megatron-core, as pytest parameters. See oracles/README.md."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SYSTEMS = ("sglang", "vllm", "megatron")
FOLDER = Path(__file__).parent / "oracles"


@cache
def load(system: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"groups_{system}.json").read_text())


def params(part: str) -> list[Any]:
    """One parameter (system, record) for each record of `part`, "cases" or "invalid"."""
    return [
        pytest.param(system, record, id=f"{system}-{number}-{_short(record['config'])}")
        for system in SYSTEMS
        for number, record in enumerate(load(system)[part])
    ]


def _short(config: dict[str, Any]) -> str:
    return ",".join(
        f"{name}={value}" for name, value in config.items() if isinstance(value, int) and value not in (0, 1)
    )
