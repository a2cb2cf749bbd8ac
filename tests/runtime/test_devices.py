"""Pins which GPU a rank takes, and when ranks may share one."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from workbench.errors import ArgumentError
from workbench.runtime.devices import choose_job_device, let_nccl_share, take_gpu
from workbench.settings import Settings


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine with one GPU, as far as counting goes; gives the devices that were made current."""
    taken: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("NCCL_HOSTID", "")  # so that what is set here goes again
    monkeypatch.delenv("NCCL_HOSTID")
    monkeypatch.setenv("NCCL_MNNVL_ENABLE", "")
    monkeypatch.delenv("NCCL_MNNVL_ENABLE")
    monkeypatch.delenv("WORKBENCH_SHARE_GPUS", raising=False)
    return taken


def test_a_rank_without_a_gpu_of_its_own_takes_none_unless_it_may_share(
    one_gpu: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("RANK", "7")
    with pytest.raises(ArgumentError, match=r"LOCAL_RANK=3 has no GPU: torch finds 1; .* WORKBENCH_SHARE_GPUS=1"):
        take_gpu(Settings())
    assert one_gpu == []
    assert take_gpu(Settings(share_gpus=True)) == 0
    assert one_gpu == [0]
    assert os.environ["NCCL_HOSTID"] == "workbench-rank-7"


def test_nccl_is_told_nothing_where_every_rank_has_a_gpu_of_its_own(
    one_gpu: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert take_gpu(Settings()) == 0
    let_nccl_share(Settings())
    assert "NCCL_HOSTID" not in os.environ


@pytest.mark.usefixtures("one_gpu")
def test_a_job_of_more_ranks_than_gpus_needs_the_setting_and_one_that_times_never_gets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ArgumentError, match=r"torch finds 1; .* or WORKBENCH_SHARE_GPUS=1"):
        choose_job_device("cuda", 4, may_share=True)
    monkeypatch.setenv("WORKBENCH_SHARE_GPUS", "1")
    assert choose_job_device("cuda", 4, may_share=True) == ("cuda", 4)
    assert choose_job_device("cuda", None, may_share=True) == ("cuda", 2)
    with pytest.raises(ArgumentError, match="4 ranks on cuda need a GPU each") as told:
        choose_job_device("cuda", 4)
    assert "SHARE" not in str(told.value)
