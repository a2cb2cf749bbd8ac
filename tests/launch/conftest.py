"""One cluster of four ranks for all tests that leave it usable: a start takes seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from workbench import Cluster, GroupMap
from workbench.errors import WorkbenchError

GROUPS = {"tp": [[0, 1], [2, 3]], "cp": [[0, 2], [1, 3]]}


@pytest.fixture(scope="session")
def shared() -> Iterator[Cluster]:
    with Cluster(group_map=GroupMap.custom(GROUPS), device="cpu", timeout_s=30) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    """The shared cluster, idle, its ranks alive, its groups usable, and so again after the test."""
    yield shared
    try:
        shared.rebuild()
    except WorkbenchError as e:
        print(f"restarted after a test: {e}", file=sys.stderr)
        shared.restart()


def measured(what: str, seconds: float) -> float:
    """Print a measured time, for `pytest -rP`, and give it back."""
    print(f"measured: {what}: {seconds:.3f} s")
    return seconds
