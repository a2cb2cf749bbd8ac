"""flashinfer-ai/flashinfer#3408 and vllm-project/vllm#43616.

Symptom: TP2 x PP2 hangs in autotuning or capture. Two causes are on record: the rendezvous of a stage's workspace took
all ranks; and peers launched different numbers of blocks, so that a barrier with a flag a block never completes. The
second is modelled with threads.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import torch
import torch.distributed as dist

from tests.bugs.worlds import HANG_S, HIDDEN, error_name, fused, only, open_session, part, plain_world
from tests.forked import run_ranks
from workbench.fabric import Fabric, simulated
from workbench.plan.blocks import count_blocks
from workbench.ranks import GroupKey, GroupMap


def test_old_the_first_stages_rendezvous_waits_for_the_second_stage() -> None:
    def body(rank: int) -> object:
        with plain_world(HANG_S):
            if rank >= 2:
                return "autotunes something else"
            told = [None] * dist.get_world_size()
            return error_name(lambda: dist.all_gather_object(told, rank))

    assert run_ranks(4, body) == ["RuntimeError"] * 2 + ["autotunes something else"] * 2


def test_the_stages_prepare_and_run_at_their_own_times() -> None:
    group_map = GroupMap.build("vllm", tp=2, pp=2)
    assert group_map.groups["tp"] == ((0, 1), (2, 3))

    def body(rank: int) -> list[float]:
        with open_session(group_map) as s:
            sums = []
            for tokens in (4, 8, 16) if rank < 2 else (4,):
                s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=tokens)
                sums.append(only(s.all_reduce(part(rank, tokens), group="tp")))
            return [*sums, only(fused(s, "tp").residual)]

    assert run_ranks(4, body) == [[11.0, 11.0, 11.0, 16.0]] * 2 + [[1100.0, 1105.0]] * 2


def _pass_a_barrier(blocks: tuple[int, int]) -> list[bool]:
    """Two devices; block b of each raises its flag b and waits for flag b of the other. Did all blocks get through?"""
    flags = [[threading.Event() for _ in range(max(blocks))] for _ in range(2)]
    passed = [False, False]

    def launch(device: int) -> None:
        mine, theirs = (flags[d][: blocks[device]] for d in (device, 1 - device))
        for flag in mine:
            flag.set()
        passed[device] = all(flag.wait(0.3) for flag in theirs)

    threads = [threading.Thread(target=launch, args=(d,)) for d in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return passed


# Two devices of one model, of which one has a multiprocessor less for us.
UNEQUAL = Fabric(
    GroupKey("tp", (0, 1)),
    tuple(replace(simulated("h200x2").facts_of(r), num_sms=sms) for r, sms in enumerate((5, 4))),
)


def test_old_each_device_counts_its_own_blocks_and_the_fifth_waits_for_ever() -> None:
    blocks = tuple(count_blocks("sms", sms=f.num_sms, ws=2) for f in UNEQUAL.facts)
    assert blocks == (5, 4)
    assert _pass_a_barrier(blocks) == [False, True]


def test_blocks_are_counted_from_what_every_member_has() -> None:
    blocks = tuple(count_blocks("sms", sms=UNEQUAL.num_sms, ws=2) for _ in UNEQUAL.facts)
    assert blocks == (4, 4)
    assert _pass_a_barrier(blocks) == [True, True]
