"""sgl-project/sglang#29073.

Symptom: TP8 on one node, all eight workers sit in the rendezvous of the fused workspace and none goes on. Cause: not
stated in the report. Modelled: every rank enters the exchange and one of them never sends its part.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.bugs.worlds import HIDDEN, end_after, fused, hung, only, open_session, plain_world
from tests.forked import run_outcomes, run_ranks
from workbench.backends import shm
from workbench.errors import DeadlineError
from workbench.ranks import GroupMap

PAIR = GroupMap.custom({"tp": [[0, 1]]})


class _NeverDone:
    def is_completed(self) -> bool:
        return False


def _withhold(calls_before: int) -> None:
    """In this process, the all-gather after `calls_before` others is entered and nothing is sent."""
    whole, made = dist.all_gather, []

    def all_gather(*args, **kwargs):
        made.append(1)
        return whole(*args, **kwargs) if len(made) <= calls_before else _NeverDone()

    dist.all_gather = all_gather


def test_old_with_torchs_own_timeout_nobody_says_anything_for_half_an_hour() -> None:
    def body(rank: int) -> None:
        with plain_world(timeout_s=1800):
            if rank == 1:
                time.sleep(60)
            dist.all_gather_object([None, None], "handle")

    assert all(map(hung, run_outcomes(2, body, while_running=end_after(1))))


def test_the_wait_ends_and_says_that_all_came_and_in_which_step_it_stands() -> None:
    def body(rank: int) -> tuple[str, tuple[int, ...]]:
        with pytest.raises(DeadlineError) as e, open_session(PAIR, timeout_s=1.5) as s:
            if rank == 1:
                _withhold(calls_before=2)  # what is asked for, the facts, and then what each rank can do
            s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=4)
        return str(e.value), e.value.missing

    told = run_ranks(2, body)
    assert told[0] == told[1]
    text, missing = told[0]
    assert text.startswith("tp[0,1]: probe: waited 1.5 s though every member entered it")
    assert missing == ()


def test_the_switch_avoids_the_rendezvous_and_the_sum_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(channel: object, request: object) -> None:
        raise AssertionError("shared memory is exchanged")

    monkeypatch.setenv("WORKBENCH_FUSION", "0")
    monkeypatch.setattr(shm, "bind", refuse)

    def body(rank: int) -> tuple[str, float]:
        with open_session(PAIR, "tp") as s:
            return s.why("tp").choice, only(fused(s, "tp").residual)

    assert run_ranks(2, body) == [("gloo", 16.0)] * 2
