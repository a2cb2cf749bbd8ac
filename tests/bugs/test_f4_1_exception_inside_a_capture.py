"""sgl-project/sglang#11275.

Symptom: one rank runs out of memory while graphs are captured; its exception is never shown and all ranks hang in
"registering 0 addresses". Cause: the exchange at the end of the capture runs in a `finally`, also on the rank that
failed, and meets whatever the others are doing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from tests.bugs.worlds import HANG_S, fused, only, open_session, plain_world
from tests.forked import run_outcomes, run_ranks
from workbench.errors import CaptureError
from workbench.ranks import GroupMap

THREE = GroupMap.custom({"tp": [[0, 1, 2]]})


def test_old_the_failure_of_one_rank_is_a_timeout_on_all_and_named_on_none() -> None:
    @contextmanager
    def capture() -> Iterator[None]:
        try:
            yield
        finally:
            dist.all_gather_object([None] * 3, "registering 0 addresses")

    def body(rank: int) -> None:
        with plain_world(HANG_S), capture():
            if rank == 1:
                raise MemoryError("no room for this graph")
            dist.all_reduce(torch.ones(1))

    outcomes = run_outcomes(3, body)
    assert all(o.error is not None for o in outcomes)
    assert not any("no room for this graph" in str(o.error) for o in outcomes)
    assert not any(isinstance(o.error, MemoryError) for o in outcomes)


def test_the_failure_of_one_rank_is_every_ranks_error_and_its_own_cause_there() -> None:
    def body(rank: int) -> tuple[str, str, float]:
        with open_session(THREE, "tp") as s:
            with pytest.raises(CaptureError) as e, s.capture():
                if rank == 1:
                    raise MemoryError("no room for this graph")
                fused(s, "tp")
            return str(e.value), type(e.value.__cause__).__name__, only(fused(s, "tp").residual)

    text = "the capture failed on world rank 1: MemoryError: no room for this graph; no rank may replay"
    assert run_ranks(3, body) == [(text, cause, 116.0) for cause in ("NoneType", "MemoryError", "NoneType")]
