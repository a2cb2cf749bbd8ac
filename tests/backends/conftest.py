"""Compiles the CPU kernels once, before tests fork ranks that would wait for it; no test leaves memory behind."""

from collections.abc import Iterator

import pytest

from workbench.backends import segments
from workbench.backends.build import build_cpu, find_compiler


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    if find_compiler() is not None:
        build_cpu()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No segment of an ended process stays, whatever a test does. Other programs on the machine may have live ones."""
    before = segments.list_segments()
    yield
    assert {s.name for s in segments.list_segments() if not s.alive} <= {s.name for s in before}
