"""pegainfer-project/pegainfer#498.

Symptom: capturing graphs under TP deadlocks. Cause: each rank decides by itself whether a batch size is captured now or
replayed; a rank that records its collective leaves the one that runs it alone.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.bugs.worlds import HANG_S, HIDDEN, error_name, fused, only, open_session, plain_world
from tests.forked import run_outcomes, run_ranks
from workbench.errors import DeadlineError
from workbench.ranks import GroupMap

PAIR = GroupMap.custom({"tp": [[0, 1]]})


def test_old_the_rank_that_runs_waits_for_the_rank_that_records() -> None:
    def body(rank: int) -> object:
        with plain_world(HANG_S):
            recorded = []
            x = torch.ones(HIDDEN)
            if rank == 0:
                recorded.append(lambda: dist.all_reduce(x))
                return "recorded"
            return error_name(lambda: dist.all_reduce(x))

    assert run_ranks(2, body) == ["recorded", "RuntimeError"]


def test_a_rank_that_does_not_capture_is_named_by_the_one_that_does_and_the_other_way_round() -> None:
    def body(rank: int) -> None:
        with open_session(PAIR, "tp", timeout_s=1.5) as s:
            if rank == 0:
                with s.capture():
                    fused(s, "tp")
            else:
                fused(s, "tp")

    captures, runs = (o.error for o in run_outcomes(2, body))
    assert isinstance(captures, DeadlineError)
    assert captures.missing == (1,)
    assert str(captures).startswith("enter a capture: world rank 0 waited 1.5 s for world rank 1")
    assert isinstance(runs, DeadlineError)
    if str(runs) != str(captures):  # its own deadline came first
        assert runs.missing == (0,)
        assert str(runs).startswith("tp[0,1]: call 1 (all_reduce_add_rms_norm")


def test_ranks_that_agree_on_the_bucket_first_capture_and_replay_it_together() -> None:
    tokens, buckets, captured = (3, 4), (2, 4, 8), ({2}, {2, 4})  # of world ranks 0 and 1

    def body(rank: int) -> tuple[int, bool, float]:
        with open_session(PAIR, "tp", max_tokens=8) as s:
            told = s.gather_object([tokens[rank], sorted(captured[rank])], group="tp")
            bucket = min(b for b in buckets if b >= max(n for n, _ in told))
            capture_now = not all(bucket in have for _, have in told)
            with s.capture() as c:
                out = fused(s, "tp", tokens=bucket)
            c.replay()
            return bucket, capture_now, only(out.residual)

    assert run_ranks(2, body) == [(4, True, 16.0)] * 2
