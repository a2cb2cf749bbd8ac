"""sgl-project/sglang#38952 and #34474, NVIDIA/TensorRT-LLM#17379 and #8372.

Symptom: an idle rank dies on an empty grid or on reshaping nothing; or one empty rank stays away from a collective, or
makes all ranks skip it. Cause: kernels and schedulers that take at least one token for granted.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.bugs.worlds import HANG_S, HIDDEN, RESIDUAL, error_name, fused, only, open_session, part, plain_world
from tests.forked import run_ranks
from workbench.ops import FusedOutput
from workbench.ranks import GroupMap
from workbench.runtime import Session

PAIR = GroupMap.custom({"tp": [[0, 1]]})
WAYS = ("shm", "gloo", "frozen", "captured", "alone")


def test_old_rows_are_reshaped_by_a_size_that_nothing_determines() -> None:
    with pytest.raises(RuntimeError, match="0 elements"):
        torch.empty(0, HIDDEN).view(0, -1)


def test_old_a_rank_without_tokens_stays_away_and_its_peer_waits() -> None:
    def body(rank: int) -> object:
        with plain_world(HANG_S):
            x = part(rank, tokens=2 if rank == 0 else 0)
            if x.shape[0] == 0:
                return "nothing to do"
            return error_name(lambda: dist.all_reduce(x))

    assert run_ranks(2, body) == ["RuntimeError", "nothing to do"]


def _run_empty(s: Session, way: str) -> FusedOutput:
    s.prepare("tp" if way != "alone" else "one", hidden=HIDDEN, dtype=torch.float32, max_tokens=2, **_named(way))
    if way == "frozen":
        s.freeze()
    if way != "captured":
        return fused(s, "tp" if way != "alone" else "one", tokens=0)
    with s.capture() as c:
        out = fused(s, "tp", tokens=0)
    c.replay()
    return out


def _named(way: str) -> dict[str, str]:
    return {"backend": way} if way in ("shm", "gloo") else {}


@pytest.mark.parametrize("way", WAYS)
def test_empty_in_empty_out_and_the_next_call_is_right(way: str) -> None:
    group_map = GroupMap.custom({"tp": [[0, 1]], "one": [[0], [1]]})

    def body(rank: int) -> tuple[list[int], list[int], list[int], float]:
        with open_session(group_map) as s:
            out = _run_empty(s, way)
            kind = "tp" if way != "alone" else "one"
            plain = s.all_reduce(torch.empty(0, HIDDEN), group=kind)
            shapes = (list(out.norm.shape), list(out.residual.shape), list(plain.shape))
            return (*shapes, only(fused(s, kind).residual))

    empty = [0, HIDDEN]
    sums = [16.0, 16.0] if way != "alone" else [6.0, 15.0]
    assert run_ranks(2, body) == [(empty, empty, empty, total) for total in sums]


def test_a_rank_without_tokens_joins_with_the_agreed_padding_and_takes_no_row_of_its_own() -> None:
    tokens = (2, 0)

    def body(rank: int) -> tuple[int, list[float]]:
        with open_session(PAIR, "tp", check=True) as s:
            padded = max(s.gather_object(tokens[rank], group="tp"))
            x = torch.zeros(padded, HIDDEN)
            x[: tokens[rank]] = part(rank)[0]
            residual = torch.full((padded, HIDDEN), RESIDUAL)
            out = s.all_reduce_add_rms_norm(x, residual, torch.ones(HIDDEN), eps=1e-6, group="tp")
            return padded, out.residual[:, 0].tolist()

    assert run_ranks(2, body) == [(2, [6.0, 6.0])] * 2
