"""What the processes of a cluster are told: one record, written as a file into the cluster's private directory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """How the ranks of one start are made.

    connection_file: ipyparallel's JSON for engines; it holds the key that signs messages.
    directory: private directory that receives traces, stacks and the failure file.
    owner: mark of the process these ranks must not outlive; "" for none.
    mark: what these ranks carry and no others do, so that all they started ends with them; "" for none.
    device: "cpu", "cuda", or None for the choice that a Session makes.
    group_map: GroupMap.to_json(), or None.
    attempt: how often the ranks of this directory were started before.
    nanny: whether each engine gets ipyparallel's own watching process. A Cluster watches the processes itself.
    """

    ranks: int
    connection_file: str
    directory: str
    owner: str = ""
    mark: str = ""
    device: str | None = None
    timeout_s: float = 60.0
    group_map: Mapping[str, Any] | None = None
    attempt: int = 0
    nanny: bool = False

    @property
    def failure_file(self) -> Path:
        """Where the agent tells which rank failed first."""
        return Path(self.directory) / f"failure-{self.attempt}.json"

    def stacks_file(self, world_rank: int) -> Path:
        """Where a rank's stack goes when it is asked for it."""
        return Path(self.directory) / f"stacks-{world_rank}.txt"

    def save(self) -> Path:
        """Write the record for the agent, mode 0600; gives the path."""
        path = Path(self.directory) / f"engines-{self.attempt}.json"
        write_private(path, json.dumps(asdict(self)))
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> EngineSpec:
        return cls(**json.loads(Path(path).read_text()))


def write_private(path: Path, text: str) -> None:
    """Replace `path` by a file of mode 0600 with this text: a reader finds the old or the new, never a half."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(fd, "w") as f:
        f.write(text)
    os.replace(part, path)
