"""sgl-project/sglang#20239.

Symptom: wrong output whenever the fused kernel declines. Cause: the fallback added and normalised without the
all-reduce that the kernel would have done; one vendor's branch had it, the others not.
"""

from __future__ import annotations

import pytest
import torch

from tests.bugs.worlds import HIDDEN, RESIDUAL, fused, only, open_session, part, plain_world
from tests.forked import run_ranks
from workbench.ops import FusedOutput, add_rms_norm
from workbench.ranks import GroupMap
from workbench.runtime import Session

PAIR = GroupMap.custom({"tp": [[0, 1]]})
WAYS = ("shm", "gloo", "frozen", "switched off")


def test_old_the_fallback_normalises_a_part_of_the_sum() -> None:
    def fused_kernel(x: torch.Tensor) -> FusedOutput | None:
        return None  # it declines this message

    def body(rank: int) -> float:
        with plain_world():
            x, residual = part(rank), torch.full((1, HIDDEN), RESIDUAL)
            out = fused_kernel(x) or add_rms_norm(x, residual, torch.ones(HIDDEN), eps=1e-6)
            return only(out.residual)

    assert run_ranks(2, body) == [6.0, 15.0]  # right: 16 on both


def _run(s: Session, way: str) -> FusedOutput:
    """The same five tokens: on a path asked by name, beyond a frozen workspace, or with fusion switched off."""
    named = {"backend": way} if way in ("shm", "gloo") else {}
    s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=4 if way == "frozen" else 5, **named)
    if way == "frozen":
        s.freeze()
    return fused(s, "tp", tokens=5)


def test_every_way_of_not_fusing_gives_the_fused_result_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for way in WAYS:
        monkeypatch.setenv("WORKBENCH_FUSION", "0" if way == "switched off" else "1")

        def body(rank: int, way: str = way) -> tuple[str, float, list[int], float]:
            with open_session(PAIR) as s:
                out = _run(s, way)
                plain = only(s.all_reduce(part(rank, 4), group="tp"))
                return s.why("tp").choice, only(out.residual), out.norm.view(torch.int32).unique().tolist(), plain

        found[way] = run_ranks(2, body)
    assert {way: [choice for choice, *_ in by_rank] for way, by_rank in found.items()} == {
        "shm": ["shm", "shm"],
        "gloo": ["gloo", "gloo"],
        "frozen": ["shm", "shm"],
        "switched off": ["gloo", "gloo"],
    }
    for by_rank in found.values():
        assert by_rank[0] == by_rank[1]
        assert by_rank[0][1:] == found["shm"][0][1:]
        assert (by_rank[0][1], by_rank[0][3]) == (16.0, 11.0)
