"""flashinfer-ai/flashinfer#1223 and #1229, sgl-project/sglang#7864.

Symptom: illegal memory access with hidden 4096 and up to 131072 tokens. Cause: a buffer's bytes were computed in 32
bits: 4096 * 131072 * 4 is one more than the largest such number.
"""

from __future__ import annotations

import ctypes
import re

import pytest
import torch

from tests.forked import run_ranks
from workbench.backends.build import build_cpu
from workbench.backends.shm_library import DTYPE_CODES, Layout, load_library
from workbench.fabric import Fabric, simulated
from workbench.plan import Ask, decide_path
from workbench.ranks import GroupKey, GroupMap
from workbench.runtime import Session, room

HIDDEN, TOKENS = 4096, 131072


def test_old_the_product_is_negative_in_32_bits() -> None:
    assert HIDDEN * TOKENS * 4 == 2147483648
    assert ctypes.c_int32(HIDDEN * TOKENS * 4).value == -2147483648


def test_the_kernels_own_layout_counts_in_64_bits() -> None:
    layout = Layout()
    arena_bytes = 2 * HIDDEN * TOKENS * 4
    assert load_library(build_cpu()).wbk_layout_of(HIDDEN, DTYPE_CODES[torch.float32], arena_bytes, layout)
    assert layout.arena_bytes == 4294967296
    assert layout.segment_bytes >= layout.arena_offset + 4294967296


def test_a_plan_refuses_such_a_message_by_its_size_and_names_the_path_that_takes_it() -> None:
    machine = simulated("h100x8")
    fabric = Fabric(GroupKey("tp", (0, 1, 2, 3)), tuple(machine.facts_of(r) for r in range(4)))
    plan = decide_path(fabric, Ask(hidden=HIDDEN, tokens=TOKENS, dtype="float32"))
    assert plan.choice == "nccl"
    assert dict(plan.rejected)["custom.fused"] == "2 GiB is above the 16 MiB at which sm90/ws4 fused ends"


def test_without_room_for_it_the_group_says_the_true_number_and_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda: 1 << 30)  # a machine with 1 GiB of shared memory

    def body(rank: int) -> tuple[str, str, float]:
        with Session(GroupMap.custom({"tp": [[0, 1]]}), device="cpu", timeout_s=20) as s:
            plan = s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=TOKENS)
            x = torch.full((2, HIDDEN), 10.0**rank)
            return plan.choice, plan.rejected[0][1], s.all_reduce(x, group="tp").unique().item()

    found = run_ranks(2, body)
    assert found == [found[0]] * 2
    choice, reason, total = found[0]
    assert (choice, total) == ("gloo", 11.0)
    asked = re.match(r"world ranks 0, 1: (\d+) bytes asked \((\d+) each\) of /dev/shm, 1073741824 are free", reason)
    assert asked is not None, reason
    assert int(asked[1]) == 2 * int(asked[2]) > 2 * 4294967296
