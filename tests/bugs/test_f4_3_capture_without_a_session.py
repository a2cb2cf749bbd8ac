"""sgl-project/sglang#14193.

Symptom: illegal memory access with piecewise graphs. Cause: only the full-graph runner told the op that a capture is on
and registered its buffers afterwards; the piecewise runner captured the same op without either. Modelled on CPU, where
torch is made to say that a foreign capture is on.
"""

from __future__ import annotations

import pytest
import torch

from tests.bugs.worlds import HIDDEN, error_name, fused, only, open_session, part
from tests.forked import run_ranks
from workbench.errors import CaptureError
from workbench.ranks import GroupMap

PAIR = GroupMap.custom({"tp": [[0, 1]]})


def test_old_a_runner_that_opens_no_session_replays_addresses_that_no_peer_knows() -> None:
    recorded: list[int] = []
    known_to_peers: set[int] = set()

    def all_reduce(address: int) -> None:
        recorded.append(address)  # the stream captures, so the input is taken to be registered in the end

    def full_graph_runner(address: int) -> None:
        all_reduce(address)
        known_to_peers.update(recorded)

    def piecewise_runner(address: int) -> None:
        all_reduce(address)

    full_graph_runner(0x1000)
    piecewise_runner(0x2000)
    assert set(recorded) - known_to_peers == {0x2000}


def test_a_second_runner_on_the_same_session_takes_the_copy_path_and_both_are_right() -> None:
    def body(rank: int) -> tuple[float, float, float]:
        with open_session(PAIR, "tp") as s:
            x = part(rank)
            with s.capture() as c:
                captured = s.all_reduce(x, group="tp")
            piece = only(s.all_reduce(part(rank), group="tp"))
            c.replay()
            first = only(captured)
            x.mul_(2)
            c.replay()
            return piece, first, only(captured)

    assert run_ranks(2, body) == [(11.0, 11.0, 22.0)] * 2


def test_under_a_foreign_capture_the_op_and_what_waits_or_allocates_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def body(rank: int) -> list[str]:
        with open_session(PAIR, "tp") as s:
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            s.device = "cuda"
            texts = []
            s._calls._device = "cuda"
            for call in (
                lambda: fused(s, "tp"),
                lambda: s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=64),
                lambda: s.gather_object(rank, group="tp"),
                lambda: s.barrier(group="tp"),
                s.freeze,
            ):
                with pytest.raises(CaptureError) as e:
                    call()
                texts.append(str(e.value).split(" on world rank")[0].removeprefix("tp[0,1]: "))
            s.device = s._calls._device = "cpu"
            assert error_name(lambda: only(fused(s, "tp").residual)) == 16.0
            return texts

    assert run_ranks(2, body) == [["all_reduce_add_rms_norm", "prepare", "gather_object", "barrier", "freeze"]] * 2
