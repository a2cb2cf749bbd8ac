"""sgl-project/sglang#34230.

Symptom: wrong output and no error, with symmetric memory, speculative decoding and captured graphs. Cause: kernels took
a peer's buffer to lie at the offset of their own, and the ranks' allocators had different histories.
"""

from __future__ import annotations

import pytest
import torch

from tests.bugs.worlds import HIDDEN, only, open_session
from tests.forked import run_ranks
from workbench.ranks import GroupMap


class _Pool:
    """First-fit memory of four slots."""

    def __init__(self) -> None:
        self.slots: list[float | None] = [None] * 4

    def put(self, value: float) -> int:
        offset = self.slots.index(None)
        self.slots[offset] = value
        return offset


def test_old_a_peer_is_read_at_the_readers_own_offset() -> None:
    pools = [_Pool(), _Pool()]
    pools[1].put(999.0)  # rank 1 holds a draft model's buffer
    captured = [pools[r].put(10.0**r) for r in range(2)]
    assert captured == [0, 1]
    sums = [sum(pool.slots[captured[r]] or 0.0 for pool in pools) for r in range(2)]
    assert sums == [1000.0, 10.0]  # right: 11 on both


@pytest.mark.parametrize("captured", [False, True])
def test_buffers_at_different_offsets_are_read_where_each_peer_put_its_own(captured: bool) -> None:
    def body(rank: int) -> tuple[int, float]:
        with open_session(GroupMap.custom({"tp": [[0, 1]]}), "tp") as s:
            first = s.empty((1, HIDDEN), torch.float32, group="tp")
            if rank == 1:
                first.fill_(999)
            x = s.empty((1, HIDDEN), torch.float32, group="tp") if rank == 1 else first
            x.fill_(10.0**rank)
            offset = x.data_ptr() - first.data_ptr()
            if not captured:
                return offset, only(s.all_reduce(x, group="tp"))
            with s.capture() as c:
                out = s.all_reduce(x, group="tp")
            c.replay()
            return offset, only(out)

    (offset0, sum0), (offset1, sum1) = run_ranks(2, body)
    assert offset0 == 0 < offset1
    assert (sum0, sum1) == (11.0, 11.0)
