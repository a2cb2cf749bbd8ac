"""Compiles the CPU kernels once, before tests fork ranks that would otherwise wait for each other's compilation."""

import pytest

from workbench.backends.build import build_cpu, find_compiler


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    if find_compiler() is not None:
        build_cpu()
