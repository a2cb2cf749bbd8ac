"""Plan: the path a group takes, the reason, and what was rejected; and the rule that picks it from voted verdicts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from workbench.fabric import name_shares


class Standing(Enum):
    """How well founded a plan is."""

    UNSUPPORTED = "unsupported"
    DEFAULT = "default"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class WorkspaceKey:
    """What makes two workspaces the same: ordered ranks (never the group's size), backend, dtype, hidden, purpose."""

    world_ranks: tuple[int, ...]
    backend: str
    dtype: str
    hidden: int
    purpose: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """One backend as the members of a group see it: (world_rank, ok, reason) for each member, in group_rank order."""

    backend: str
    verdicts: tuple[tuple[int, bool, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The path one group takes for one workspace. Equal on every member; prints on one line."""

    group: str
    choice: str
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()
    fallback: str = ""
    capacity_tokens: int = 0
    workspace_bytes: int = 0
    standing: Standing = Standing.DEFAULT

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "rejected": [list(r) for r in self.rejected], "standing": self.standing.value}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        rejected = tuple((str(name), str(reason)) for name, reason in data["rejected"])
        return cls(**{**data, "rejected": rejected, "standing": Standing(data["standing"])})

    def __str__(self) -> str:
        names_by_reason: dict[str, list[str]] = {}
        for name, reason in self.rejected:
            names_by_reason.setdefault(reason, []).append(name)
        rejected = "".join(f"; not {', '.join(names)}: {reason}" for reason, names in names_by_reason.items())
        fallback = f"; fallback {self.fallback}" if self.fallback else ""
        return (
            f"{self.group}: {self.choice} ({self.standing.value}): {self.reason}; up to {self.capacity_tokens} tokens "
            f"in {self.workspace_bytes} bytes a rank{fallback}{rejected}"
        )


def decide_backend(candidates: Sequence[Candidate]) -> tuple[str | None, tuple[tuple[str, str], ...]]:
    """The first candidate that every member accepts, and the rejected ones before it with their reasons.

    Pure, so that members holding the same voted verdicts decide alike. Gives (None, rejected) if none is left.
    """
    rejected: list[tuple[str, str]] = []
    for candidate in candidates:
        refusals: dict[str, list[int]] = {}
        for world_rank, ok, reason in candidate.verdicts:
            if not ok:
                refusals.setdefault(reason, []).append(world_rank)
        if not refusals:
            return candidate.backend, tuple(rejected)
        rejected.append((candidate.backend, name_shares(refusals)))
    return None, tuple(rejected)


def fingerprint(record: object) -> str:
    """A record as compact JSON with sorted keys, for comparing across ranks."""
    return json.dumps(record, sort_keys=True, separators=(",", ":"))
