"""Pins how the two backends over gloo refuse and end. Their arithmetic is in test_arithmetic.py."""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.backends.ranks import channels, request, run_ranks
from workbench.backends import gloo, reference
from workbench.errors import ArgumentError, CapacityError, ClosedError, DeadlineError
from workbench.ops import Op
from workbench.ranks import GroupKey, GroupMap
from workbench.runtime import Session

THREE = GroupMap.build("sglang", tp=3)
BACKENDS = {"gloo": gloo, "reference": reference}


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_different_tokens_are_an_error_on_both_sides_where_gloo_would_crash(backend: ModuleType) -> None:
    def rank_main(rank: int) -> tuple[str, str]:
        with channels((0, 1)) as [channel]:
            workspace = backend.bind(channel, request(16))
            workspace.all_reduce(torch.ones(1, 16).bfloat16())
            with pytest.raises(ArgumentError) as caught:
                workspace.all_reduce(torch.ones(2 + rank, 16).bfloat16())
            with pytest.raises(ClosedError) as later:
                workspace.all_reduce(torch.ones(1, 16).bfloat16())
            return str(caught.value), str(later.value)

    texts = run_ranks(2, rank_main)
    assert [text for text, _ in texts] == [
        "tp[0,1]: call 2: world rank 0 came with all_reduce, 2 tokens of hidden 16, bfloat16 but world rank 1 came "
        "with all_reduce, 3 tokens of hidden 16, bfloat16; every member must make the same call"
    ] * 2
    for text, later in texts:
        assert text in later


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_a_refused_call_waits_for_nobody_and_close_is_final(backend: ModuleType) -> None:
    def rank_main(rank: int) -> float:
        with channels((0, 1)) as [channel]:
            workspace = backend.bind(channel, request(16, max_tokens=4))
            if rank == 1:  # alone, so a call that waited would hang
                with pytest.raises(CapacityError):
                    workspace.all_reduce(torch.ones(5, 16).bfloat16())
                with pytest.raises(ArgumentError):
                    workspace.all_reduce(torch.ones(16, 4).bfloat16().t())
            x = workspace.empty((4, 16), torch.bfloat16)
            x.fill_(1.0)
            total = workspace.all_reduce(x)
            assert x.unique().tolist() == [1.0]
            workspace.close()
            workspace.close()
            with pytest.raises(ClosedError, match="the workspace is closed"):
                workspace.all_reduce(x)
            channel.gather(None, what="meeting")
            return float(total[3, 15])

    assert run_ranks(2, rank_main) == [2.0, 2.0]


def test_a_rank_that_stops_while_data_moves_is_named_alike_by_the_others(tmp_path: Path) -> None:
    """Rank 1 agrees on the call and then sends nothing: only it is missing, whoever waits for it.

    Pinned for one of the two backends, since it takes two deadlines: moving data is the same code for both.
    """

    def rank_main(rank: int) -> tuple[tuple[int, ...], str]:
        with pytest.raises(DeadlineError) as caught, Session(THREE, device="cpu", timeout_s=4.0) as s:
            workspace = gloo.bind(s._groups[0, 1, 2].channel, request(16))
            x = torch.ones(1, 16).bfloat16()
            workspace.all_reduce(x)
            if rank == 1:
                workspace._num_calls += 1
                workspace._match(Op.ALL_REDUCE, 1, 0.0, 0.0)
                deadline = time.monotonic() + 30
                while len(list(tmp_path.iterdir())) < 2:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
                workspace._match(Op.ALL_REDUCE, 1, 0.0, 0.0)  # too late: it hears what the others said of it
            try:
                workspace.all_reduce(x)
            finally:
                (tmp_path / f"told{rank}").touch()
                assert "waited 4 s for world rank 1" in workspace.broken
                with pytest.raises(ClosedError):
                    workspace.all_reduce(x)
        return caught.value.missing, str(caught.value)

    ended = run_ranks(3, rank_main)
    assert ended[0][0] == (1,)
    assert "waited 4 s for world rank 1, which did not enter it" in ended[0][1]
    assert ended == [ended[0]] * 3


def test_probe_refuses_other_dtypes() -> None:
    key = GroupKey("tp", (0, 1))
    for backend in BACKENDS.values():
        assert backend.probe(request(16), key).ok
        assert "torch.float64" in backend.probe(request(16, torch.float64), key).reason
