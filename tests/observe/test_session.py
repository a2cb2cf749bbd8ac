"""Our own Session in a recorded program: its fused calls stand in the same trace as the program's."""

from __future__ import annotations

from pathlib import Path

from tests.observe.traced import begins, results, torchrun, workbench_trace


def test_fused_calls_of_a_session_are_in_the_trace_with_their_path_and_nothing_is_found(tmp_path: Path) -> None:
    traced = workbench_trace(tmp_path, torchrun("session.py"))
    assert (traced.status, traced.document["findings"]) == (0, []), traced.stderr
    assert results(traced.stdout) == {"0": "384.0", "1": "384.0"}
    for rank in (0, 1):
        fused = [e for e in begins(traced.trace, rank) if e.op == "all_reduce_add_rms_norm"]
        assert [(e.group.world_ranks, e.shape) for e in fused if e.group] == [((0, 1), (2, 64))]
        assert fused[0].path
        assert fused[0].site is not None
        assert fused[0].site.function == "main"
    assert any("attention_tp" in text for r in traced.trace.ranks for text in r.declared)
