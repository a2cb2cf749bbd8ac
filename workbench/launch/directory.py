"""The private directories of clusters: one each, mode 0700, with the record by which a later process finds the cluster.

They lie under <temporary directory>/workbench-<uid>. The record holds no secret; the key that signs messages is in
ipyparallel's connection files, in the same directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workbench.errors import ResourceError
from workbench.launch.spec import write_private
from workbench.launch.survivors import mark_lives

CLUSTER_ID = "wb"
"""ipyparallel's name for each cluster; the directory tells them apart."""

_RECORD = "cluster.json"
_RANK_BYTES = 12 << 20  # two trace files, and room for logs
_SWEEP_AGE_S = 3600.0  # a directory without a record is a start in progress, unless it is this old


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRecord:
    """What another process must know to work with a cluster. `controller` and `agent` are marks of processes.

    rank_marks: the ranks' processes, by world rank.   generation: of their groups.   attempt: counts restarts.
    started_s: seconds since 1970.
    """

    name: str
    ranks: int
    device: str
    timeout_s: float
    keep: bool
    controller: str
    agent: str
    rank_marks: tuple[str, ...]
    started_s: float
    group_map: Mapping[str, Any] | None = None
    generation: int = 0
    attempt: int = 0
    schema: int = 1

    @property
    def directory(self) -> Path:
        return directories() / self.name

    @property
    def engines_file(self) -> Path:
        """What the ranks were told at their latest start: an EngineSpec."""
        return self.directory / f"engines-{self.attempt}.json"

    def save(self) -> None:
        write_private(self.directory / _RECORD, json.dumps(asdict(self)))

    @classmethod
    def load(cls, directory: Path) -> ClusterRecord:
        """Raises FileNotFoundError where no cluster has come up, ResourceError for no record of this version."""
        try:
            data = json.loads((directory / _RECORD).read_text())
            if data["schema"] != 1:
                raise ValueError(f"schema {data['schema']}")
            return cls(**{**data, "rank_marks": tuple(data["rank_marks"])})
        except (ValueError, KeyError, TypeError) as e:
            raise ResourceError(
                f"{directory / _RECORD} is no record of this version of the package ({type(e).__name__}: {e}); "
                f"{directory} can be removed"
            ) from e


def directories() -> Path:
    """The folder of all clusters of this user, made if need be. Raises ResourceError if it is not this user's alone."""
    path = Path(tempfile.gettempdir()) / f"workbench-{os.getuid()}"
    with contextlib.suppress(FileExistsError):  # what it is, is seen below
        try:
            path.mkdir(mode=0o700)
        except (FileNotFoundError, PermissionError, NotADirectoryError) as e:
            raise ResourceError(f"{path} cannot be made: {e.strerror}; set TMPDIR to a directory you can write") from e
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise ResourceError(
            f"{path} must be a directory of user {os.getuid()} with mode 0700, but it is one of user {info.st_uid} "
            f"with mode {stat.S_IMODE(info.st_mode):04o}; remove it, or set TMPDIR to another place"
        )
    return path


def claim_directory(ranks: int) -> Path:
    """A new private directory for one cluster, with room for the traces of so many ranks. Raises: ResourceError."""
    path = directories() / secrets.token_hex(4)
    needed, free = ranks * _RANK_BYTES, shutil.disk_usage(path.parent).free
    if free < needed:
        raise ResourceError(
            f"{ranks} ranks need {needed >> 20} MiB for their traces, and {path.parent} has {free >> 20} MiB left; "
            f"make room, set TMPDIR to another place, or start fewer ranks"
        )
    path.mkdir(mode=0o700)
    return path


def has_record(directory: Path) -> bool:
    """Whether the cluster in this directory has come up, so that another process can find it."""
    return (directory / _RECORD).exists()


def connection_file(directory: Path, kind: str) -> Path:
    """ipyparallel's connection file: `kind` is "client" or "engine"."""
    return directory / "profile" / "security" / f"ipcontroller-{CLUSTER_ID}-{kind}.json"


def find_records(*, clear: bool = True) -> tuple[ClusterRecord, ...]:
    """The records of running clusters of this user, oldest first. `clear` removes what dead ones left."""
    found = []
    for directory in directories().iterdir():
        try:
            record = ClusterRecord.load(directory)
        except (OSError, ResourceError):
            old = _age_s(directory) > _SWEEP_AGE_S
            if clear and old and not mark_lives(_controller_of(directory)):
                shutil.rmtree(directory, ignore_errors=True)
            continue
        if mark_lives(record.controller):
            found.append(record)
        elif clear:
            shutil.rmtree(directory, ignore_errors=True)
    return tuple(sorted(found, key=lambda r: r.started_s))


def find_record(name: str | None) -> ClusterRecord:
    """The record of the running cluster of this name, or of the only one. Raises: ResourceError."""
    records = find_records()
    found = [record for record in records if name in (None, record.name)]
    if len(found) == 1:
        return found[0]
    there = ", ".join(record.name for record in records) or "none"
    asked = f"cluster {name!r}" if name is not None else "the running cluster"
    raise ResourceError(
        f"{asked} cannot be attached; running: {there}; name one of them, or start one: Cluster(keep=True)"
    )


def _controller_of(directory: Path) -> str:
    """The mark in a record of whatever version: its cluster may run. "" where there is none."""
    try:
        return str(json.loads((directory / _RECORD).read_text())["controller"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _age_s(directory: Path) -> float:
    try:
        return time.time() - directory.stat().st_mtime
    except FileNotFoundError:
        return 0.0
