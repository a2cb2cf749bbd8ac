"""Pins what the paths over torch's symmetric memory and NCCL's windows refuse, and the deadline of the rendezvous."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.backends.ranks import channels, request, run_ranks
from workbench.backends import nccl_window, symm_mem
from workbench.ops import Rounding
from workbench.ranks import GroupKey


def test_torch_must_be_kept_from_multicast_before_the_job_starts() -> None:
    assert symm_mem.find_switch_problem("1") == ""
    for value in ("", "0", "true"):
        assert symm_mem.find_switch_problem(value) == (
            f"TORCH_SYMM_MEM_DISABLE_MULTICAST is {value!r}; torch would make a multicast object: set it to 1 before "
            f"the job starts"
        )


def test_nccl_must_be_kept_from_multicast_before_the_job_starts() -> None:
    assert nccl_window.find_switch_problem("0") == ""
    assert nccl_window.find_switch_problem("1").startswith("NCCL_NVLS_ENABLE is '1'; NCCL would make a multicast")
    assert nccl_window.find_switch_problem("").startswith("NCCL_NVLS_ENABLE is ''")


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ((0, 1), ""),
        ((1, 0), ""),  # two numbers add up alike either way
        (tuple(range(8)), ""),
        ((0, 2, 1, 3), "torch numbers tp[0,2,1,3] in another order, and would add in that order"),
        (tuple(range(9)), "9 ranks; torch's symmetric memory serves 2 to 8 here"),
    ],
)
def test_limits_of_symmetric_memory(ranks: tuple[int, ...], reason: str) -> None:
    assert symm_mem.find_limit(request(7168), GroupKey("tp", ranks)) == reason


def test_the_buffer_is_fp32_unless_one_rounded_addition_is_the_contract() -> None:
    twice, once = request(64, rounding=Rounding.TWICE), request(64)
    assert symm_mem.choose_dtype(twice, 2) is torch.bfloat16
    assert symm_mem.choose_dtype(twice, 4) is torch.float32  # torch would round after each of three additions
    assert symm_mem.choose_dtype(once, 2) is torch.float32
    assert symm_mem.choose_dtype(request(64, torch.float16, rounding=Rounding.TWICE), 2) is torch.float32


def test_a_wait_on_the_groups_store_ends_with_the_channels_timeout_and_the_old_one_comes_back() -> None:
    def body(rank: int) -> tuple[bool, float]:
        with channels((0, 1)) as (channel,):
            store = dist.distributed_c10d._get_process_group_store(channel.torch_group)
            before = store.timeout
            started = time.monotonic()
            with pytest.raises(dist.DistError), symm_mem.store_deadline(channel.torch_group, 0.3):
                store.get("what nobody sets")
            return store.timeout == before, time.monotonic() - started

    for restored, waited_s in run_ranks(2, body):
        assert restored
        assert waited_s >= 0.3  # and not the group's own 60 s, the most that ranks may take here


@pytest.mark.skipif(torch.cuda.is_available(), reason="says why a machine without a GPU does not serve")
def test_probes_say_why_not_on_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    key = GroupKey("tp", (0, 1))
    assert symm_mem.probe(request(64), key).reason == "torch finds no usable GPU"
    assert nccl_window.probe(request(64), key).reason == "torch finds no usable GPU"
