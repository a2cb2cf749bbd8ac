"""Pins that jobs and clusters of ours keep the libraries from making multicast objects, unless the user allows them."""

from __future__ import annotations

import pytest

from workbench.launch.job import _job_environment
from workbench.launch.multicast import multicast_switches
from workbench.launch.processes import rank_environment

OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def test_multicast_is_off_unless_allowed_and_what_is_set_stays() -> None:
    assert multicast_switches({}) == OFF
    assert multicast_switches({"WORKBENCH_MULTICAST": "1"}) == {}
    assert multicast_switches({"NCCL_NVLS_ENABLE": "2"}) == {**OFF, "NCCL_NVLS_ENABLE": "2"}


def test_ranks_of_jobs_and_clusters_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*OFF, "WORKBENCH_MULTICAST"):
        monkeypatch.delenv(name, raising=False)
    for environment in (_job_environment({}, 2), rank_environment(2, "mark")):
        assert OFF.items() <= environment.items()
