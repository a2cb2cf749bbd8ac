"""The environment that makes every Python process below a command record itself. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

DIRECTORY = "WORKBENCH_OBSERVE"
"""Names the directory that receives the trace files. Set in every process of a recorded command."""

RANK_OWNER = "WORKBENCH_OBSERVE_RANK"
"""`<RANK>:<pid>` of the process that is this rank: its helpers inherit RANK too, and are not it."""

STARTUP = str(Path(__file__).parent / "startup")


def recorded_environment(environ: Mapping[str, str], directory: str) -> dict[str, str]:
    """`environ` with what a Python process needs to record into `directory`. Again is fine."""
    path = [p for p in environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != STARTUP]
    return {**environ, DIRECTORY: directory, "PYTHONPATH": os.pathsep.join([STARTUP, *path])}


def is_recorded(environ: Mapping[str, str]) -> bool:
    """Whether a Python process of this environment records itself."""
    return bool(environ.get(DIRECTORY)) and STARTUP in environ.get("PYTHONPATH", "").split(os.pathsep)


def claim_rank(environ: dict[str, str] | os._Environ[str]) -> int | None:
    """The world rank of this process where a launcher gave it one; None for a helper that inherited a rank's RANK."""
    text = environ.get("RANK", "")
    if not text.isdigit():
        return None
    owner = environ.get(RANK_OWNER, "")
    mine = f"{text}:{os.getpid()}"
    if owner.partition(":")[0] == text and owner != mine:
        return None
    environ[RANK_OWNER] = mine
    return int(text)
