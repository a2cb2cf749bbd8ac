"""Pins what the flashinfer path refuses and chooses, and how a failure in its set-up reaches every member.

Needs no FlashInfer: the rules are ours. The installed one is met in test_flashinfer_interface.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.backends.ranks import channels, request, run_ranks
from workbench.backends import flashinfer, flashinfer_mnnvl
from workbench.backends.flashinfer_comm import ChannelComm, create_together
from workbench.errors import LayoutError, ResourceError
from workbench.ops import Rounding
from workbench.plan import all_paths, find_switch, path_order
from workbench.ranks import GroupKey
from workbench.settings import Settings

TWICE = Rounding.TWICE


@pytest.mark.parametrize(
    ("size", "asked", "reason"),
    [
        (2, request(7168, rounding=TWICE), ""),
        (16, request(7168, rounding=TWICE), ""),
        (2, request(2880, torch.float32), ""),
        (3, request(7168, rounding=TWICE), "3 ranks; FlashInfer's trtllm kernels serve 2, 4, 8, 16"),
        (2, request(7168, torch.float64, rounding=TWICE), "torch.float64; FlashInfer serves bfloat16, float16"),
        (2, request(7172, rounding=TWICE), "rows of 14344 bytes; FlashInfer serves multiples of 16"),
        (2, request(8200, rounding=TWICE), "hidden 8200: 1025 vectors of 16 bytes a row do not divide"),
        (2, request(7168), "FlashInfer rounds the sum before it adds the residual; prepare with rounding='twice'"),
    ],
)
def test_limits_are_told_before_anything_is_imported(size: int, asked: flashinfer.Request, reason: str) -> None:
    told = flashinfer.find_limit(asked, size)
    assert told.startswith(reason)
    assert bool(told) == bool(reason)


def test_a_workspace_whose_clear_pointer_would_overflow_is_refused_with_the_largest_that_fits() -> None:
    """8 ranks x 8192 tokens x 8192 x 2 bytes is 1 GiB exactly: the product that needs a 33rd bit two buffers on."""
    told = flashinfer.find_limit(request(8192, max_tokens=8192, rounding=TWICE), 8)
    assert told == (
        "8192 tokens make buffers of 1073741824 bytes, and from 1073741824 on its kernels clear the wrong memory; "
        "prepare at most 8191 tokens"
    )
    assert flashinfer.find_limit(request(8192, max_tokens=8191, rounding=TWICE), 8) == ""


def test_one_shot_is_chosen_by_bytes_and_two_shot_only_for_more_tokens_than_ranks() -> None:
    wide = request(8192, max_tokens=8192, rounding=TWICE)
    assert [flashinfer.choose_one_shot(t, wide, 2) for t in (1, 8192, 8193)] == [True, True, False]
    assert [flashinfer.choose_one_shot(t, wide, 8) for t in (168, 169)] == [True, False]
    assert [flashinfer.choose_one_shot(t, wide, 16) for t in (16, 84, 85)] == [True, True, False]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says why a machine without a GPU does not serve")
def test_probe_says_why_not_on_a_machine_without_a_gpu() -> None:
    verdict = flashinfer.probe(request(7168, rounding=TWICE), GroupKey("tp", (0, 1)))
    assert (verdict.ok, verdict.reason) == (False, "torch finds no usable GPU")


def test_an_interface_that_lost_a_parameter_is_refused_by_name() -> None:
    def create(backend, world_size, rank, max_token_num, hidden_dim, dtype):
        """A version of before comm_backend."""

    comm = SimpleNamespace(create_allreduce_fusion_workspace=create)
    told = flashinfer.find_drift(comm, "0.5.0")
    assert told == "FlashInfer 0.5.0: create_allreduce_fusion_workspace takes no comm_backend; use 0.7.2.post1"


def test_mnnvl_stands_behind_the_multicast_setting_and_is_no_default() -> None:
    mnnvl, trtllm = (all_paths()[name] for name in ("flashinfer_mnnvl", "flashinfer"))
    assert find_switch(mnnvl, Settings()) == "needs multicast; WORKBENCH_MULTICAST=1 allows it"
    assert find_switch(mnnvl, Settings(multicast=True)) == ""
    assert find_switch(trtllm, Settings()) == ""
    assert not any("flashinfer_mnnvl" in path_order(device) for device in ("cpu", "cuda"))
    assert "never run" in (flashinfer_mnnvl.__doc__ or "")


def test_ranks_and_roots_are_group_ranks_on_interleaved_groups() -> None:
    """Group rank 1 of [0,2] is world rank 2; of [1,3], world rank 3; of (3, 1), which torch sorts, world rank 1."""

    def body(rank: int) -> list:
        with channels((0, 2), (1, 3), (3, 1)) as mine:
            told = []
            for channel in mine:
                comm = ChannelComm(channel)
                told.append((comm.Get_rank(), comm.allgather(f"w{rank}"), comm.bcast(f"root w{rank}", 1)))
                comm.barrier()
            return told

    zero, one, two, three = run_ranks(4, body)
    assert zero == [(0, ("w0", "w2"), "root w2")]
    assert two == [(1, ("w0", "w2"), "root w2")]
    assert one == [(0, ("w1", "w3"), "root w3"), (1, ("w3", "w1"), "root w1")]
    assert three == [(1, ("w1", "w3"), "root w3"), (0, ("w3", "w1"), "root w1")]


def test_a_root_outside_the_group_is_told_before_any_wait() -> None:
    def body(rank: int) -> str:
        with channels((0, 1)) as (channel,):
            with pytest.raises(LayoutError) as told:
                ChannelComm(channel).bcast("x", 2)
            return str(told.value)

    assert run_ranks(2, body) == [r"tp[0,1] has no group rank 2; allowed: 0..1"] * 2


def test_a_failure_in_the_middle_is_the_same_error_on_every_member_and_the_channel_goes_on() -> None:
    """World rank 3 fails between two exchanges while world rank 1 already waits in the second; group [0,2] is fine."""

    def create(comm: ChannelComm, rank: int) -> tuple:
        comm.allgather(rank)
        if rank == 3:
            raise MemoryError("no room for 2 MiB")
        return comm.allgather(rank)

    def body(rank: int) -> tuple:
        with channels((0, 2), (1, 3)) as (channel,):
            try:
                made = create_together(channel, "a workspace", lambda comm: create(comm, rank))
            except ResourceError as e:
                made = (str(e),)
            return made, channel.gather(rank, what="meeting")

    zero, one, two, three = run_ranks(4, body)
    assert zero == two == ((0, 2), [0, 2])
    assert one == three
    assert one == (
        ("tp[1,3]: a workspace failed; world rank 3: MemoryError: no room for 2 MiB",),
        [1, 3],
    )


def test_a_member_that_fails_after_the_last_exchange_undoes_it_for_all() -> None:
    def create(comm: ChannelComm, rank: int) -> str:
        comm.barrier()
        if rank == 0:
            raise RuntimeError("cuMemMap failed")
        return "made"

    def body(rank: int) -> str:
        with channels((0, 1, 2)) as (channel,):
            with pytest.raises(ResourceError) as told:
                create_together(channel, "a workspace", lambda comm: create(comm, rank))
            return str(told.value)

    assert set(run_ranks(3, body)) == {"tp[0,1,2]: a workspace failed; world rank 0: RuntimeError: cuMemMap failed"}
