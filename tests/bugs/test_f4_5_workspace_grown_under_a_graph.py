"""flashinfer-ai/flashinfer#4553 and vllm-project/vllm#52553.

Symptom: a crash minutes after the start. Cause: a shared scratch buffer was enlarged in place after earlier graphs had
captured its address, and the next replay of such a graph writes into freed memory.
"""

from __future__ import annotations

import pytest
import torch

from tests.bugs.worlds import HIDDEN, fused, only, open_session
from tests.forked import run_ranks
from workbench.errors import CaptureError
from workbench.ranks import GroupMap

PAIR = GroupMap.custom({"tp": [[0, 1]]})


def test_old_the_address_in_the_graph_is_no_longer_the_buffers() -> None:
    scratch = torch.zeros(64)
    captured = scratch.data_ptr()
    scratch.resize_(1 << 20)
    assert scratch.data_ptr() != captured


def test_after_freeze_growth_is_refused_and_the_graphs_memory_stays_where_it_is() -> None:
    def body(rank: int) -> tuple[str, bool, list[float]]:
        with open_session(PAIR, "tp") as s:
            x = s.empty((1, HIDDEN), torch.float32, group="tp")
            x.fill_(10.0**rank)
            captured_address = x.data_ptr()
            with s.capture() as c:
                out = s.all_reduce(x, group="tp")
            s.freeze()
            with pytest.raises(CaptureError) as e:
                s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=64)
            c.replay()
            found = [only(out), only(fused(s, "tp", tokens=64).residual)]
            x.mul_(2)
            c.replay()
            return str(e.value), x.data_ptr() == captured_address, [*found, only(out)]

    for text, same, values in run_ranks(2, body):
        assert text.startswith("tp[0,1]: the session is frozen, so no workspace is made or grown")
        assert same
        assert values == [11.0, 16.0, 22.0]


def test_before_freeze_a_larger_workspace_is_a_new_one_and_the_captured_one_lives_on() -> None:
    def body(rank: int) -> tuple[bool, list[float]]:
        with open_session(PAIR, "tp") as s:
            x = s.empty((1, HIDDEN), torch.float32, group="tp")
            x.fill_(10.0**rank)
            with s.capture() as c:
                out = s.all_reduce(x, group="tp")
            s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=64)
            y = s.empty((64, HIDDEN), torch.float32, group="tp")
            y.fill_(7)
            c.replay()
            return x.data_ptr() != y.data_ptr(), [only(out), only(s.all_reduce(y, group="tp"))]

    assert run_ranks(2, body) == [(True, [11.0, 14.0])] * 2
