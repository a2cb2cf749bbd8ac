"""vllm-project/vllm#8410, NVIDIA/TensorRT-LLM#2560.

Symptom: one rank is stuck in custom all-reduce and the others are past it; forcing the library's path helps, and no log
says more. Cause: unsafe signals. Modelled with threads and one flag that never arrives; on real ranks with a rank that
never raises its flags.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.bugs.worlds import fused, open_session
from tests.forked import run_outcomes
from workbench.errors import DeadlineError
from workbench.ranks import GroupMap


def _barrier(lost: tuple[int, int]) -> list[list[int]]:
    """Three devices raise a flag for every other one; `lost` is (from, to). Gives whose flags each one misses."""
    flags = {(a, b): threading.Event() for a in range(3) for b in range(3) if a != b}
    missing: list[list[int]] = [[], [], []]

    def device(me: int) -> None:
        for (source, _), flag in flags.items():
            if source == me and (source, _) != lost:
                flag.set()
        missing[me] = [source for (source, to), flag in flags.items() if to == me and not flag.wait(0.3)]

    threads = [threading.Thread(target=device, args=(d,)) for d in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return missing


def test_old_without_the_peers_name_all_that_is_seen_is_that_one_is_stuck() -> None:
    stuck = [bool(missing) for missing in _barrier(lost=(2, 0))]
    assert stuck == [True, False, False]  # and nothing says whether 1 or 2 is to blame


def test_with_it_the_flag_is_found() -> None:
    assert _barrier(lost=(2, 0)) == [[2], [], []]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_rank_that_raises_no_flag_is_named_on_every_other_rank(backend: str) -> None:
    def body(rank: int) -> tuple[int, ...] | None:
        with open_session(GroupMap.custom({"tp": [[0, 1, 2]]}), timeout_s=1.5) as s:
            s.prepare("tp", hidden=8, dtype=torch.float32, max_tokens=4, backend=backend)
            if rank == 2:
                time.sleep(2.2)
                return None
            with pytest.raises(DeadlineError, match="world rank 2") as e:
                fused(s, "tp")
            return e.value.missing

    assert [o.value for o in run_outcomes(3, body)][:2] == [(2,), (2,)]
