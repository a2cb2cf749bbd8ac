"""Nothing is said of what a Session records of itself: groups, votes, captures, fallbacks, a rebuild."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.forked import run_ranks
from workbench import GroupMap, Session
from workbench.diagnose import diagnose
from workbench.trace import read_directory


def test_a_session_that_went_well_is_no_finding(tmp_path: Path) -> None:
    group_map = GroupMap.build("sglang", tp=4, attn_cp=2, moe_ep=2)

    def body(rank: int) -> None:
        with Session(group_map, device="cpu", timeout_s=20, trace_dir=str(tmp_path)) as s:
            for kind in ("tp", "attention_tp"):
                s.prepare(kind, hidden=8, dtype=torch.float32, max_tokens=16)
            x, weight = torch.ones(4, 8), torch.ones(8)
            s.all_reduce_add_rms_norm(x, torch.ones(4, 8), weight, eps=1e-6, group="tp")
            if rank < 2:
                s.gather_object(rank, group="attention_tp")
            s.broadcast_object(rank, group="tp", group_root=2)
            with s.capture() as c:
                s.all_reduce(x, group="tp")
            c.replay()
            s.freeze()
            s.all_reduce(torch.ones(32, 8), group="tp")  # more than was prepared: the fallback
            s.rebuild()
            s.barrier(group="tp")

    run_ranks(4, body)
    trace = read_directory(tmp_path)
    assert len(trace.events) > 100
    assert diagnose(trace) == ()
