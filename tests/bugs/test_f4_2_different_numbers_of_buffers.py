"""vllm-project/vllm#39788 and #39791.

Symptom: a strange out-of-memory error, or a fault some time after the capture has ended. Cause: ranks registered
different numbers of buffers, and each walks its peer's list of handles with its own count.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.bugs.worlds import fused, only, open_session, plain_world
from tests.forked import run_ranks
from workbench.errors import CaptureError, ClosedError
from workbench.ranks import GroupMap

CALLS = (3, 2)  # on world ranks 0 and 1


def test_old_one_rank_reads_past_its_peers_list_and_the_other_notices_nothing() -> None:
    def body(rank: int) -> str:
        with plain_world():
            told: list = [None, None]
            dist.all_gather_object(told, [f"buffer {i} of {rank}" for i in range(CALLS[rank])])
            peer = told[1 - rank]
            try:
                return str([peer[i] for i in range(CALLS[rank])])
            except IndexError:  # in C++ there is none: it opens what lies behind the list
                return "reads past the end"

    assert run_ranks(2, body) == ["reads past the end", "['buffer 0 of 0', 'buffer 1 of 0']"]


def test_both_counts_are_named_on_both_ranks_before_anything_is_replayed() -> None:
    def body(rank: int) -> tuple[str, float]:
        with open_session(GroupMap.custom({"tp": [[0, 1]]}), "tp") as s:
            with pytest.raises(CaptureError) as e, s.capture() as c:
                for _ in range(CALLS[rank]):
                    fused(s, "tp")
            with pytest.raises(ClosedError):
                c.replay()
            with s.capture() as c:
                outs = [fused(s, "tp").residual for _ in range(3)]
            c.replay()
            return str(e.value), sum(map(only, outs))

    text = "tp[0,1]: members captured different numbers of calls (world rank 0: 3, world rank 1: 2); no rank may replay"
    assert run_ranks(2, body) == [(text, 48.0)] * 2
